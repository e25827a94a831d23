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

const last = unpackAll(data.last), path = unpackAll(data.path), rounds = unpackAll(data.rounds);
const runs = unpackAll(data.runs), pairs = unpackAll(data.pairs);

// Coordinates of a method that have numbers of their own. The mean over all coordinates stands before them.
const kept = (cell, k) => data.names[cell.names[k]].slice(0, data.kept);

// Where the numbers of a method in a cell begin: levels come first, then coordinates, then rounds.
const next = { last: 0, path: 0, rounds: 0, runs: 0 };
data.cells.forEach((cell, index) => {
  cell.index = index;
  cell.at = cell.methods.map((_, k) => {
    const at = { ...next }, count = data.levels.length * (1 + kept(cell, k).length);
    next.last += count;
    next.path += count * cell.saves.length;
    next.rounds += cell.saves.length;
    next.runs += 1;
    return at;
  });
});

// The place of the chosen level and coordinate, or -1 for a method without that coordinate.
function place(cell, k, atLevel = chosen.level, coordinate = chosen.coordinate) {
  const names = kept(cell, k), j = coordinate === "" ? 0 : names.indexOf(coordinate) + 1;
  return coordinate !== "" && !j ? -1 : atLevel * (1 + names.length) + j;
}

const unique = (values) => [...new Set(values)];
const chosen = {
  problem: "", algorithm: "", steps: "", schedule: "", coordinate: "",
  level: data.level,
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
function view(cell, k, atLevel = chosen.level, coordinate = chosen.coordinate) {
  const at = cell.at[k], where = place(cell, k, atLevel, coordinate);
  const value = (column) => where < 0 ? NaN : last[column][at.last + where];
  const coverage = value("coverage"), error = value("coverage_mcse"), n = runs.n_ok[at.runs];
  const variance = coverage * (1 - coverage), certain = !(variance > 0 && error > 0);
  // A mean over coordinates has the error of so many independent ones.
  const [low, high] = wilson(coverage, certain ? n : variance / error ** 2);
  const nominal = data.levels[atLevel], shrink = certain ? 1 : error * Math.sqrt(n / variance);
  // The standard error that exact intervals would have: that of 100 % is not 0.
  const score = (coverage - nominal) / (Math.sqrt((nominal * (1 - nominal)) / n) * shrink);
  return {
    cell, method: cell.methods[k], coverage, n, low, high, score, error, shrink,
    length: value("length"), lengthError: value("length_mcse"),
    sent: runs.numbers_sent[at.runs], sentOverC1: runs.sent_over_c1[at.runs],
  };
}

const coordinateName = () => chosen.coordinate === "" ? "mean over all coordinates" : chosen.coordinate;

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
  // The first digit of the error, or two if that is 1.
  const power = Math.floor(Math.log10(error)), one = error / 10 ** power < 2 ? 1 : 0;
  const places = Math.min(9, Math.max(0, one - power));
  return `${x.toFixed(places)} (${error.toFixed(places)})`.replace("-", "−");
}

const percent = (x, error) => {
  if (!Number.isFinite(x)) return "–";
  const [value, spread] = withError(100 * x, 100 * error).split(" ");
  return `${value} %${spread ? ` ${spread}` : ""}`;
};
const apart = (score) => !(Math.abs(score) > 2) ? "" : score < 0 ? "below" : "above";
