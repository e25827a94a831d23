// Choices, and drawing again when they change.
function redraw() {
  tip.hidden = true;
  if (document.documentElement.dataset.ready) remember();
  const cells = cellsChosen();
  document.getElementById("nothing").hidden = cells.length > 0;
  drawHeadline(cells);
  drawCoverage(cells);
  drawTradeoff(cells);
  drawRounds(cells);
  drawNested(cells);
  drawPairs(cells);
  drawZip();
  drawTable(cells);
}

function choice(key, name, values, text = String, all = true) {
  if (values.length < 2) return [];
  const select = element("select", { "data-key": key, onchange: () => {
    chosen[key] = key === "level" ? Number(select.value) : select.value;
    redraw();
  } });
  if (all) select.append(element("option", { value: "" }, key === "coordinate" ? "mean over all" : "all"));
  values.forEach((value, i) => select.append(element("option", { value: key === "level" ? i : value }, text(value))));
  if ([...select.options].some((option) => option.value === String(chosen[key]))) select.value = String(chosen[key]);
  else chosen[key] = key === "level" ? data.level : "";
  return [element("label", {}, `${name} `, select)];
}

function legend() {
  return data.methods.map((name, method) => {
    const button = element("button", {
      type: "button", class: "method", "aria-pressed": String(visible(method)),
      onclick: () => {
        chosen.hidden.has(method) ? chosen.hidden.delete(method) : chosen.hidden.add(method);
        button.setAttribute("aria-pressed", String(visible(method)));
        redraw();
      },
    }, swatch(hue(method)), name);
    return button;
  });
}

// Measures that need the truth cannot be chosen if the truth is unknown.
function withoutTruth() {
  for (const input of document.querySelectorAll("figure input[type=radio]")) {
    if (input.value === "length") input.checked = true;
    else input.closest("label").hidden = true;
  }
}

// Choices stand in the address, so that they can be sent, and stay when the page is loaded again.
const KEPT = ["problem", "algorithm", "steps", "schedule", "coordinate", "level"];

function recall() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const key of KEPT) if (given.has(key)) chosen[key] = key === "level" ? Number(given.get(key)) : given.get(key);
  (given.get("hidden") ?? "").split(",").filter(Boolean).forEach((method) => chosen.hidden.add(Number(method)));
}

function remember() {
  const given = new URLSearchParams();
  for (const key of KEPT) if (chosen[key] !== (key === "level" ? data.level : "")) given.set(key, chosen[key]);
  if (chosen.hidden.size) given.set("hidden", [...chosen.hidden].join(","));
  try { history.replaceState(null, "", `#${given}`); } catch { /* a browser that forbids it for files */ }
}

function start() {
  recall();
  if (!last.coverage.some(Number.isFinite)) withoutTruth();
  const values = (key) => unique(data.cells.map((cell) => cell[key]));
  document.getElementById("choices").append(
    ...choice("problem", "Problem", values("problem")),
    ...choice("algorithm", "Algorithm", values("algorithm")),
    ...choice("steps", "Steps", values("steps").sort((a, b) => a - b), grouped),
    ...choice("schedule", "Schedule", values("schedule")),
    ...choice("level", "Level", data.levels, (x) => `${number(100 * x)} %`, false),
    ...choice("coordinate", "Coordinate", unique(data.names.flatMap((names) => names.slice(0, data.kept)))),
    element("div", { class: "legend", role: "group", "aria-label": "Methods" }, ...legend()));
  for (const caption of document.querySelectorAll("figure figcaption")) {
    if (data.partial) caption.prepend(element("strong", { class: "partial" }, `${data.partial} `));
  }
  for (const place of document.querySelectorAll("figure, #out")) place.append(downloads(place.id));
  fillZipChoice();
  data.methods.forEach((name, i) => document.querySelector("#rounds select").append(element("option", { value: i }, name)));
  document.body.append(tip, live);
  document.querySelectorAll("figure input, figure select").forEach((input) => input.addEventListener("change", redraw));
  startTable();
  redraw();
  let width = window.innerWidth, timer = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return; // a phone's address bar comes and goes
    width = window.innerWidth;
    clearTimeout(timer);
    timer = setTimeout(redraw, 150);
  });
  document.documentElement.dataset.ready = "1";
}

// The cell that is furthest from its level comes first to mind.
function fillZipChoice() {
  const select = document.querySelector("#zip select");
  let worst = 0, most = -1;
  data.cells.forEach((cell, i) => {
    select.append(element("option", { value: i }, cellName(cell)));
    cell.methods.forEach((_, k) => {
      const size = Math.abs(view(cell, k, 0).score);
      if (size > most) { most = size; worst = i; }
    });
  });
  select.value = String(worst);
}

if (data.refresh) setTimeout(() => location.reload(), 1000 * data.refresh);
if (data.cells.length) start();
else document.documentElement.dataset.ready = "1";
