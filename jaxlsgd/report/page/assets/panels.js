// A figure is a grid of panels; a panel is one drawing whose points can be pointed at and walked through.
const MOST_PANELS = 6, MOST_ALL = 60;
const tip = element("div", { class: "tip", hidden: true });
const live = element("div", { class: "unseen", "aria-live": "polite" });

// `panels` are {title, draw(svg, width) => {height, points, name}}; points are {x, y, text, cell}.
function figure(id, panels, { most = MOST_PANELS, rows = () => [] } = {}) {
  rowsOf.set(id, rows);
  const place = document.querySelector(`#${id} .panels`);
  const shown = panels.slice(0, place.dataset.all ? MOST_ALL : most);
  place.replaceChildren(...shown.map(() => element("div", { class: "panel" })));
  const widths = [...place.children].map((child) => child.clientWidth);
  shown.forEach((panel, i) => fill(place.children[i], panel, widths[i] || 340));
  document.getElementById(id).hidden = !panels.length;
  document.querySelector(`#${id} .more`)?.remove();
  if (panels.length > most) place.after(moreButton(place, panels.length, most));
}

function moreButton(place, count, most) {
  const all = place.dataset.all, few = `${most} of ${grouped(count)} panels are shown`;
  const text = all ? `Show only the first ${most} panels` : `Show ${count > MOST_ALL ? `${MOST_ALL} panels` : "all"} (${few})`;
  return element("button", {
    type: "button", class: "more",
    onclick: () => { all ? delete place.dataset.all : (place.dataset.all = "1"); redraw(); },
  }, text);
}

function fill(place, panel, width) {
  const svg = shape("svg", { tabindex: 0, role: "group", "aria-roledescription": "chart" });
  const { height, points, name = "" } = panel.draw(svg, width);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label",
    `${panel.title}. ${name} ${points.length} points; arrow keys walk through them, Enter opens a cell.`);
  place.append(element("h4", {}, panel.title), svg);
  walk(svg, points, width);
}

function walk(svg, points, width) {
  const ring = shape("circle", { r: 8, class: "ring", visibility: "hidden" });
  svg.append(ring);
  let at = -1;
  const order = points.map((_, i) => i).sort((i, j) => points[i].x - points[j].x || points[i].y - points[j].y);
  const go = (i, speak) => {
    at = i;
    const point = points[i];
    ring.setAttribute("cx", point.x);
    ring.setAttribute("cy", point.y);
    ring.setAttribute("visibility", "visible");
    showTip(svg, point, width);
    if (speak) live.textContent = point.text;
  };
  const leave = () => { ring.setAttribute("visibility", "hidden"); tip.hidden = true; };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect(), zoom = width / box.width;
    const x = (event.clientX - box.left) * zoom, y = (event.clientY - box.top) * zoom;
    let best = -1, least = 40 ** 2;
    points.forEach((point, i) => {
      const far = (point.x - x) ** 2 + (point.y - y) ** 2;
      if (far < least) { least = far; best = i; }
    });
    return best;
  };
  const open = (i) => { if (i >= 0 && points[i].cell) openCell(points[i].cell, svg); };
  svg.addEventListener("pointermove", (event) => {
    const i = nearest(event);
    if (i < 0) leave(); else if (i !== at || tip.hidden) go(i, false);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("click", (event) => open(nearest(event)));
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const place = order.indexOf(at), end = order.length - 1;
    const to = {
      ArrowRight: Math.min(end, place + 1), ArrowDown: Math.min(end, place + 1),
      ArrowLeft: Math.max(0, place - 1), ArrowUp: Math.max(0, place - 1),
      Home: 0, End: end,
    }[event.key];
    if (event.key === "Escape") leave();
    else if (event.key === "Enter") open(at);
    else if (to !== undefined && end >= 0) { event.preventDefault(); go(order[to], true); }
  });
}

function showTip(svg, point, width) {
  const box = svg.getBoundingClientRect(), zoom = box.width / width;
  const host = svg.closest("dialog") ?? document.body;
  if (tip.parentNode !== host) host.append(tip);
  tip.textContent = point.text;
  tip.hidden = false;
  const x = box.left + point.x * zoom, y = box.top + point.y * zoom;
  const left = Math.max(8, Math.min(x + 14, document.documentElement.clientWidth - tip.offsetWidth - 8));
  const above = y - tip.offsetHeight - 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : y + 16}px`;
}
