// Each figure as SVG or PNG, and the numbers behind it as CSV.
const rowsOf = new Map();
const INLINED = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-family", "text-anchor"];

function save(name, content, kind) {
  const url = URL.createObjectURL(new Blob([content], { type: kind }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function csvText(rows) {
  const names = unique(rows.flatMap(Object.keys));
  const field = (x) => {
    if (x === undefined || x === null || Number.isNaN(x)) return "";
    const text = typeof x === "string" && /^[=+\-@\t\r\n]/.test(x) ? `'${x}` : String(x); // no formula for a spreadsheet
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [names, ...rows.map((row) => names.map((name) => row[name]))].map((line) => `${line.map(field).join(",")}\n`).join("");
}

// A copy with the style of the page's sheet written into every element.
function inlined(original) {
  const copy = original.cloneNode(false);
  const style = getComputedStyle(original);
  copy.removeAttribute("class");
  for (const name of INLINED) if (original.nodeName !== "g") copy.setAttribute(name, style.getPropertyValue(name));
  for (const child of original.childNodes) {
    if (child.nodeType === Node.TEXT_NODE) copy.append(child.textContent);
    else if (!child.classList.contains("ring")) copy.append(inlined(child));
  }
  return copy;
}

function legendRow(width) {
  const row = shape("g");
  let x = 8, y = 12;
  data.methods.forEach((name, method) => {
    if (!visible(method)) return;
    const long = 30 + name.length * 6.6;
    if (x > 8 && x + long > width) { x = 8; y += 18; }
    row.append(mark(hue(method), x + 6, y), shape("text", { x: x + 16, y: y + 4, class: "label strong" }, name));
    x += long;
  });
  return { row, height: y + 12 };
}

// All panels of a figure as one drawing in light colours, with its title and legend.
function drawing(id) {
  const root = document.documentElement, panels = [...document.querySelectorAll(`#${id} .panel`)];
  const columns = id === "nested" || panels.length === 1 ? 1 : 2, sizes = panels.map((panel) => panel.querySelector("svg").viewBox.baseVal);
  const width = columns * Math.max(...sizes.map((size) => size.width)) + 16 * (columns + 1);
  const whole = shape("svg", { xmlns: SVG, class: "unseen" });
  root.classList.add("light");
  document.body.append(whole);
  const legend = legendRow(width);
  const heading = shape("text", { x: 16, y: 26, class: "label strong" },
    `${document.querySelector(`#${id} h2`).textContent}: ${number(100 * level())} % intervals${id === "zip" ? "" : `, ${coordinateName()}`}`);
  whole.append(shape("rect", { width: "100%", height: "100%", class: "paper" }), heading, shape("g", { transform: "translate(8,34)" }, legend.row));
  let y = 40 + legend.height;
  for (let i = 0; i < panels.length; i += columns) {
    panels.slice(i, i + columns).forEach((panel, j) => {
      const part = shape("g", { transform: `translate(${16 + j * (width / columns - 8)},${y})` });
      part.append(shape("text", { x: 0, y: 12, class: "label strong" }, panel.querySelector("h4").textContent));
      part.append(shape("g", { transform: "translate(0,18)" }, ...[...panel.querySelector("svg").childNodes].map((child) => child.cloneNode(true))));
      whole.append(part);
    });
    y += Math.max(...sizes.slice(i, i + columns).map((size) => size.height)) + 34;
  }
  whole.setAttribute("viewBox", `0 0 ${width} ${y}`);
  const made = inlined(whole);
  made.setAttribute("width", width);
  made.setAttribute("height", y);
  whole.remove();
  root.classList.remove("light");
  return { text: new XMLSerializer().serializeToString(made), width, height: y };
}

function savePicture(id) {
  const { text, width, height } = drawing(id), picture = new Image(), scale = 2;
  picture.onload = () => {
    const canvas = element("canvas", { width: width * scale, height: height * scale });
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((content) => save(`${id}.png`, content, "image/png"));
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

function downloads(id) {
  const name = document.querySelector(`#${id} h2`).textContent;
  const button = (text, press) => element("button", { type: "button", "aria-label": `Download ${name} as ${text}`, onclick: press }, text);
  const pictures = id === "out" ? [] : [
    button("SVG", () => save(`${id}.svg`, drawing(id).text, "image/svg+xml")), button("PNG", () => savePicture(id))];
  return element("div", { class: "downloads" }, "Download ", ...pictures, button("CSV", () => save(`${id}.csv`, csvText(rowsOf.get(id)()), "text/csv")));
}
