// The figures of the last round: coverage, the trade-off, paired differences.
const RIGHT = 14;

function report(v) {
  const side = apart(v.score);
  const note = side ? `\n${Math.abs(v.score).toFixed(1)} standard errors ${side} its level` : "";
  return `${data.methods[v.method]}\n${cellName(v.cell)}\n${number(100 * level())} % intervals, ${coordinateName()}\n` +
    `coverage ${percent(v.coverage, v.error)}, ${grouped(v.n)} runs${note}\n` +
    `length ${withError(v.length, v.lengthError)}\n${grouped(v.cell.rounds)} rounds` +
    (Number.isFinite(v.sent) ? `, ${grouped(v.sent)} numbers sent per client` : "");
}

// Rows of marks with bars: groups are {label, items: [{look: number, x, low, high, hollow, text, cell}]}.
function forest(groups, { domain, label, line, band, log = false }) {
  return (svg, width) => {
    const rows = groups.reduce((n, group) => n + group.items.length, 0);
    const step = rows > 60 ? 9 : 12, gap = 8, top = 6;
    const widest = Math.max(...groups.map((group) => group.label.length));
    const left = Math.min(width * 0.4, 14 + widest * 6.6);
    const bottom = top + rows * step + groups.length * gap;
    const x = scale(domain, [left, width - RIGHT], log), points = [];
    const inside = (value) => Math.max(left, Math.min(width - RIGHT, x(Math.max(value, log ? 1e-9 : value))));
    if (band) svg.append(shape("rect", {
      x: inside(band[0]), y: top, width: Math.max(0, inside(band[1]) - inside(band[0])), height: bottom - top, class: "band",
    }));
    svg.append(shape("path", { d: `M${x(line)},${top}V${bottom}`, class: "nominal" }));
    let y = top + gap / 2;
    groups.forEach((group, i) => {
      const high = group.items.length * step;
      if (i) svg.append(shape("path", { d: `M0,${y - gap / 2}H${width - RIGHT}`, class: "grid" }));
      svg.append(shape("text", { x: left - 8, y: y + high / 2 + 4, class: "label end strong" }, short(group.label, left)));
      for (const item of group.items) {
        const at = { x: inside(item.x), y: y + step / 2 };
        if (Number.isFinite(item.x)) {
          if (item.x < domain[0]) svg.append( // beyond the axis: an arrow and the number
            shape("path", { d: `M${left + 6},${at.y - 4}l-5,4l5,4`, class: `out ${look(item.look)}` }),
            shape("text", { x: left + 10, y: at.y + 4, class: `label ink ${look(item.look)}` }, number(Math.round(item.x))));
          else svg.append(
            shape("path", { d: `M${inside(item.low)},${at.y}H${inside(item.high)}`, class: `bar ${look(item.look)}` }),
            mark(item.look, at.x, at.y, item.hollow, step > 10 ? 4 : 3));
          points.push({ ...at, text: item.text, cell: item.cell });
        }
        y += step;
      }
      y += gap;
    });
    axisX(svg, x, bottom, label);
    return { height: bottom + 38, points, name: label };
  };
}

// Most panels are never looked at.
const later = (make) => (svg, width) => make()(svg, width);
const short = (text, room) => text.length * 6.6 <= room ? text : `${text.slice(0, Math.max(3, room / 6.6 - 1))}…`;

// Where 95 % of the points of exact intervals would be; a mean over coordinates varies less.
function exact(n, some = []) {
  const shrink = some.length ? some.reduce((sum, v) => sum + v.shrink, 0) / some.length : 1;
  const half = 1.96 * shrink * Math.sqrt((level() * (1 - level())) / n);
  return [100 * (level() - half), 100 * (level() + half)];
}

function drawCoverage(cells) {
  const known = (cell) => views(cell).filter((v) => Number.isFinite(v.coverage));
  const all = cells.flatMap(known);
  const domain = coverageDomain(all.flatMap((v) => [100 * v.low, 100 * v.high]));
  figure("coverage", !all.length ? [] : settings(cells).map((group) => ({
    title: settingName(group[0]),
    draw: later(() => forest(group.map((cell) => ({
      label: cell.schedule,
      items: known(cell).map((v) => ({
        look: hue(v.method), x: 100 * v.coverage, low: 100 * v.low, high: 100 * v.high,
        hollow: apart(v.score) !== "", text: report(v), cell,
      })),
    })), { domain, label: `Coverage (%), nominal ${number(100 * level())}`, line: 100 * level(), band: exact(Math.max(...group.map((cell) => cell.n)), group.flatMap(known)) })),
  })), { rows: () => all.map(coverageRow) });
}

const DEEPEST = 20; // points below the level at which an axis ends; what is lower is an arrow with its number
function coverageDomain(values) {
  const nominal = 100 * level();
  const inside = [...values].filter((x) => x >= nominal - DEEPEST);
  const domain = span(inside, { include: [nominal, ...(inside.length < values.length ? [nominal - DEEPEST] : [])] });
  return [Math.max(inside.length < values.length ? nominal - DEEPEST : domain[0], 0), Math.min(domain[1], 100.5)];
}

const where = (cell) => ({ problem: cell.problem, algorithm: cell.algorithm, schedule: cell.schedule, num_steps: cell.steps, num_rounds: cell.rounds });
const which = (v) => ({ ...where(v.cell), method: data.methodNames[v.method], level: level(), coordinate: chosen.coordinate || "mean over all" });
const coverageRow = (v) => ({ ...which(v), n_ok: v.n, coverage: v.coverage, coverage_mcse: v.error, coverage_low: v.low, coverage_high: v.high });
const lengthRow = (v) => ({ ...which(v), n_ok: v.n, length: v.length, length_mcse: v.lengthError, numbers_sent: v.sent, sent_over_c1: v.sentOverC1, coverage: v.coverage, coverage_mcse: v.error });

// Lines and points: series are {look: number, points: [{x, y, low, high, hollow, text, cell}], label}.
function plot(series, options) {
  const { xs, ys, xLabel, yLabel, logX, logY, line, band, height = 250, top = 24, diagonal, joined = true } = options;
  return (svg, width) => {
    const labelled = series.some((one) => one.label);
    const left = 46, bottom = height - 42, right = width - (labelled ? 62 : RIGHT);
    const x = scale(xs, [left, right], logX), y = scale(ys, [bottom, top], logY), points = [];
    axisY(svg, left, y, yLabel, right);
    const clamp = (value) => Math.max(top, Math.min(bottom, y(value)));
    if (band) svg.append(shape("rect", { x: left, y: clamp(band[1]), width: right - left, height: Math.max(0, clamp(band[0]) - clamp(band[1])), class: "band" }));
    if (line !== undefined) svg.append(shape("path", { d: `M${left},${clamp(line)}H${right}`, class: "nominal" }));
    if (diagonal) {
      const ends = [Math.max(xs[0], ys[0]), Math.min(xs[1], ys[1])];
      svg.append(shape("path", { d: `M${x(ends[0])},${y(ends[0])}L${x(ends[1])},${y(ends[1])}`, class: "nominal" }));
    }
    for (const one of series) drawSeries(svg, one, x, y, [top, bottom], joined, points);
    if (labelled) placeLabels(svg, series, x, y, right);
    axisX(svg, x, bottom, xLabel);
    return { height, points, name: `${yLabel} against ${xLabel}.` };
  };
}

function drawSeries(svg, one, x, y, [top, bottom], joined, points) {
  const known = one.points.filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y));
  const place = (p) => ({ x: x(p.x), y: Math.max(top, Math.min(bottom, y(p.y))), out: y(p.y) > bottom + 0.5 || y(p.y) < top - 0.5 });
  const places = known.map(place);
  let free = -Infinity;  // where there is room for the next name
  if (joined && places.length > 1) svg.append(shape("path", {
    d: `M${places.map((p) => `${p.x.toFixed(1)},${p.y.toFixed(1)}`).join("L")}`,
    class: `line ${look(one.look)}`, "stroke-dasharray": DASHES[one.look % 8],
  }));
  known.forEach((p, i) => {
    const at = places[i];
    if (p.low !== undefined) svg.append(shape("path", {
      d: `M${at.x},${Math.min(bottom, y(p.low))}V${Math.max(top, y(p.high))}`, class: `bar ${look(one.look)}`,
    }));
    // A point beyond the axes is an arrow at their edge.
    if (at.out) svg.append(shape("path", {
      d: at.y < top + 1 ? `M${at.x - 4},${top + 6}l4,-5l4,5` : `M${at.x - 4},${bottom - 6}l4,5l4,-5`, class: `out ${look(one.look)}`,
    }));
    else if (!one.plain || i === known.length - 1) svg.append(mark(one.look, at.x, at.y, p.hollow, one.size ?? 4));
    if (p.name && !at.out && at.x - p.name.length * 3.1 > free && p.name.length < 24) {
      free = at.x + p.name.length * 3.1 + 4;
      svg.append(shape("text", { x: at.x, y: Math.max(top - 2, Math.min(at.y - 9, y(p.high ?? p.y) - 5)), class: "label middle" }, p.name));
    }
    points.push({ x: at.x, y: at.y, text: p.text, cell: p.cell });
  });
}

// Names at the ends of lines, pushed apart.
function placeLabels(svg, series, x, y, right) {
  const ends = series.filter((one) => one.points.length).map((one) => {
    const end = one.points[one.points.length - 1];
    return { at: y(end.y), text: one.label, from: x(end.x), look: one.look };
  }).filter((end) => Number.isFinite(end.at)).sort((a, b) => a.at - b.at);
  let before = -Infinity;
  for (const end of ends) {
    const at = Math.max(end.at, before + 12);
    before = at;
    svg.append(
      shape("path", { d: `M${end.from + 6},${end.at}L${right + 4},${at}`, class: "leader" }),
      shape("text", { x: right + 6, y: at + 4, class: `label ${look(end.look)} ink` }, short(end.text, 54)));
  }
}

function drawTradeoff(cells) {
  const known = (cell) => views(cell).filter((v) => Number.isFinite(v.length) && Number.isFinite(v.sentOverC1));
  const groups = settings(cells.filter((cell) => known(cell).length)).filter((group) => group.length > 1);
  const all = groups.flat().flatMap(known);
  const xs = span(all.map((v) => v.sentOverC1), { log: true, pad: 0.08 });
  figure("tradeoff", groups.map((group) => ({ title: settingName(group[0]), draw: later(() => {
    const here = group.flatMap(known);
    const ys = span(here.map((v) => v.length), { log: true, pad: 0.12 });
    const methods = unique(here.map((v) => v.method));
    const series = methods.map((method) => ({
      look: hue(method),
      points: here.filter((v) => v.method === method).sort((a, b) => a.sentOverC1 - b.sentOverC1).map((v) => ({
        x: v.sentOverC1, y: v.length, low: v.length - 1.96 * v.lengthError, high: v.length + 1.96 * v.lengthError,
        hollow: apart(v.score) !== "", text: report(v), cell: v.cell,
      })),
    }));
    nameSchedules(series);
    return plot(series, { xs, ys, logX: true, logY: true, height: 306, xLabel: "Numbers sent per client / Local SGD's under C1", yLabel: "Mean length" });
  }) })), { rows: () => all.map(lengthRow) });
}

// The schedules beside the points of the method with the longest intervals, whose line is above the others.
function nameSchedules(series) {
  const size = (one) => one.points.reduce((sum, p) => sum + Math.log(p.y), 0) / one.points.length;
  const top = series.reduce((a, b) => size(b) > size(a) ? b : a);
  for (const p of top.points) p.name = p.cell.schedule;
}

function drawPairs(cells) {
  const shown = new Set(cells.map((cell) => cell.index));
  let from = 0;
  const rows = [...pairs.cell].map((index, i) => {
    const cell = data.cells[index], k = cell.methods.indexOf(pairs.method[i]), at = place(cell, k);
    const value = (column) => at < 0 ? NaN : pairs[column][from + at];
    const row = {
      cell, method: pairs.method[i], reference: data.cells[pairs.reference[i]],
      coverage: 100 * value("coverage_difference"), coverageError: 100 * value("coverage_difference_mcse"),
      ratio: value("length_ratio"), ratioError: value("length_ratio_mcse"),
    };
    from += data.levels.length * (1 + kept(cell, k).length);
    return row;
  }).filter((row) => shown.has(row.cell.index) && visible(row.method));
  const measure = document.querySelector("#pairs input:checked").value;
  const [value, error, line, label] = measure === "coverage"
    ? ["coverage", "coverageError", 0, "Difference of coverage (points)"] : ["ratio", "ratioError", 1, "Ratio of mean lengths"];
  const ends = rows.flatMap((row) => [row[value] - 1.96 * row[error], row[value] + 1.96 * row[error], row[value]]);
  const domain = span(measure === "coverage" ? ends.map((x) => Math.max(-DEEPEST, x)) : ends, { include: [line] });
  const log = measure !== "coverage" && domain[1] > 4;
  if (log) domain[0] = Math.max(0.1, Math.min(...rows.map((row) => row.ratio).filter((x) => x > 0)) / 1.2);
  const known = rows.filter((row) => Number.isFinite(row[value]));
  const byCell = new Map();
  for (const row of known) byCell.set(row.cell, [...(byCell.get(row.cell) ?? []), row]);
  figure("pairs", settings([...byCell.keys()]).map((group) => ({
    title: settingName(group[0]),
    draw: later(() => forest(group.map((cell) => ({
      label: cell.schedule,
      items: byCell.get(cell).map((row) => pairItem(row, value, error, line)),
    })), { domain, label, line, log })),
  })), { rows: () => known.map((row) => ({
    ...which(row), reference_schedule: row.reference.schedule, reference_method: data.methodNames[row.reference.methods[0]],
    coverage_difference: row.coverage / 100, coverage_difference_mcse: row.coverageError / 100,
    length_ratio: row.ratio, length_ratio_mcse: row.ratioError,
  })) });
}

function pairItem(row, value, error, line) {
  const half = 1.96 * row[error];
  const base = `${row.reference.schedule}, ${data.methods[row.reference.methods[0]]}`;
  return {
    look: hue(row.method), x: row[value], low: row[value] - half, high: row[value] + half, cell: row.cell,
    hollow: Math.abs(row[value] - line) > 2 * row[error],
    text: `${data.methods[row.method]}\n${cellName(row.cell)}\nless ${base}\n` +
      `coverage ${withError(row.coverage, row.coverageError)} points\nlength × ${withError(row.ratio, row.ratioError)}`,
  };
}
