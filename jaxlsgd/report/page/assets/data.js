// The study's numbers, and what the reader has chosen to look at.
const data = JSON.parse(document.getElementById("data").textContent);
const KINDS = { f4: Float32Array, f8: Float64Array, i4: Int32Array };

function unpack(column) {
  const [kind, text] = Object.entries(column)[0];
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new KINDS[kind](bytes.buffer);
}

const unpackAll = (columns) =>
  Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, unpack(column)]));

const last = unpackAll(data.last), path = unpackAll(data.path), each = unpackAll(data.each);
const pairs = unpackAll(data.pairs);

// Where a cell's numbers begin: in each column methods come first, then levels, then rounds.
let lastAt = 0, pathAt = 0, eachAt = 0;
data.cells.forEach((cell, index) => {
  Object.assign(cell, { index, lastAt, pathAt, eachAt });
  lastAt += cell.methods.length * data.levels.length;
  pathAt += cell.methods.length * data.levels.length * cell.saves.length;
  cell.names.forEach((name) => { eachAt += data.names[name].length; });
});

const unique = (values) => [...new Set(values)];
const chosen = {
  problem: "", algorithm: "", steps: "", schedule: "",
  level: 0,
  hidden: new Set(),
};

function cellsChosen() {
  return data.cells.filter((cell) =>
    ["problem", "algorithm", "steps", "schedule"].every((key) =>
      chosen[key] === "" || String(cell[key]) === chosen[key]));
}

const level = () => data.levels[chosen.level];
const visible = (method) => !chosen.hidden.has(method);

// One method in one cell at the last round; Wilson's interval as in `analysis.moments`.
function view(cell, k, atLevel = chosen.level) {
  const i = cell.lastAt + k * data.levels.length + atLevel;
  const coverage = last.coverage[i], n = last.n_ok[i];
  const [low, high] = wilson(coverage, n);
  const nominal = data.levels[atLevel];
  // The standard error that an exact interval would have: that of 100 % is not 0.
  const score = (coverage - nominal) / Math.sqrt((nominal * (1 - nominal)) / n);
  return {
    cell, method: cell.methods[k], coverage, n, low, high, score,
    error: Math.sqrt((coverage * (1 - coverage)) / n),
    length: last.length[i], lengthError: last.length_mcse[i],
    sent: last.numbers_sent[i], sentOverC1: last.sent_over_c1[i],
  };
}

const views = (cell) => cell.methods.map((_, k) => view(cell, k)).filter((v) => visible(v.method));

function wilson(p, n) {
  const z = 1.959963984540054, square = z * z;
  const half = z * Math.sqrt((p * (1 - p)) / n + square / (4 * n * n));
  const ends = [-1, 1].map((sign) => (p + square / (2 * n) + sign * half) / (1 + square / n));
  return [Math.max(0, ends[0]), Math.min(1, ends[1])];
}

function settings(cells) {
  const found = new Map();
  for (const cell of cells) {
    const key = JSON.stringify([cell.problem, cell.algorithm, cell.steps]);
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(cell);
  }
  return [...found.values()];
}

const several = {
  algorithm: data.algorithms.length > 1 || data.algorithms[0] !== "local_sgd",
  steps: unique(data.cells.map((cell) => cell.steps)).length > 1,
};

function settingName(cell) {
  const parts = [cell.problem];
  if (several.algorithm) parts.push(cell.algorithm);
  parts.push(`${grouped(cell.steps)} steps`);
  return parts.join(", ");
}

const cellName = (cell) => `${settingName(cell)}, ${cell.schedule}`;

// Numbers as people read them.
const grouped = (x) => Math.round(x).toLocaleString("en-GB");

function number(x) {
  if (!Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size >= 1e3 && size < 1e9) return grouped(x);
  return String(Number(x.toPrecision(3))).replace("-", "−");
}

function withError(x, error) {
  if (!Number.isFinite(x)) return "–";
  if (!(error > 0)) return number(x);
  const places = Math.min(9, Math.max(0, 1 - Math.floor(Math.log10(error))));
  return `${x.toFixed(places)} (${error.toFixed(places)})`.replace("-", "−");
}

const percent = (x, error) => {
  if (!Number.isFinite(x)) return "–";
  const [value, spread] = withError(100 * x, 100 * error).split(" ");
  return `${value} %${spread ? ` ${spread}` : ""}`;
};
const apart = (score) => !(Math.abs(score) > 2) ? "" : score < 0 ? "below" : "above";
