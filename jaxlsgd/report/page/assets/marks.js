// Elements, and the mark of each method: a colour and a shape, the same everywhere.
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  return filled(made, attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === undefined || value === null) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children); // strings become text, never markup
  return made;
}

const SHAPES = [
  (r) => `M${-r},0A${r},${r} 0 1 0 ${r},0A${r},${r} 0 1 0 ${-r},0Z`,
  (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
  (r) => `M0,${-1.25 * r}L${1.2 * r},${r}H${-1.2 * r}Z`,
  (r) => `M0,${-1.4 * r}L${1.4 * r},0L0,${1.4 * r}L${-1.4 * r},0Z`,
  (r) => `M0,${1.25 * r}L${1.2 * r},${-r}H${-1.2 * r}Z`,
  (r) => `M${-0.5 * r},${-1.3 * r}H${0.5 * r}V${-0.5 * r}H${1.3 * r}V${0.5 * r}H${0.5 * r}V${1.3 * r}H${-0.5 * r}V${0.5 * r}H${-1.3 * r}V${-0.5 * r}H${-0.5 * r}Z`,
  (r) => `M${-r},${-1.3 * r}H${r}L${0.3 * r},0L${r},${1.3 * r}H${-r}L${-0.3 * r},0Z`,
  (r) => `M${-1.3 * r},0L${-0.6 * r},${-1.1 * r}H${0.6 * r}L${1.3 * r},0L${0.6 * r},${1.1 * r}H${-0.6 * r}Z`,
];
const DASHES = ["", "6 3", "2 2", "8 3 2 3", "10 4", "4 2 1 2 1 2", "1 3", "12 3 3 3"];

// The same number is the same colour and shape on paper (`report.style`).
const hue = (method) => data.colours[method];
const look = (number) => `m${number % 8}`;

// Filled where the interval keeps its level within 2 standard errors, hollow where it does not.
function mark(number, x, y, hollow = false, size = 4) {
  const round = Math.floor(number / 8);
  return shape("path", {
    d: SHAPES[(number + round) % SHAPES.length](size),
    transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`,
    class: `mark ${look(number)}${hollow ? " hollow" : ""}`,
  });
}

function swatch(number) {
  const svg = shape("svg", { width: 22, height: 14, "aria-hidden": "true" });
  svg.append(
    shape("path", { d: "M1,7H21", class: `line ${look(number)}`, "stroke-dasharray": DASHES[number % 8] }),
    mark(number, 11, 7));
  return svg;
}
