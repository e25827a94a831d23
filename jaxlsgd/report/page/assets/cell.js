// One cell up close: zip plot, estimates against normal, lengths, coordinates, failures, replay.
const NAMES = { zip: "Intervals by rank", normal: "Estimates against normal", length: "Lengths" };

// What is kept of one coordinate at the chosen level: of the chosen one, else of the first.
const shownName = (cell, k) => kept(cell, k).includes(chosen.coordinate) ? chosen.coordinate : data.names[cell.names[k]][0];
function parts(cell, k) {
  const found = data.details[cell.index][k].of[Math.max(0, data.names[cell.names[k]].indexOf(shownName(cell, k)))] ?? {};
  return { normal: found.normal, length: found.length?.[chosen.level], zip: found.zip?.[chosen.level] };
}

// Half of the axis that all methods of a cell share.
function zipWidth(cell) {
  const all = cell.methods.flatMap((method, k) => visible(method) && parts(cell, k).zip ? bounded(unpack(parts(cell, k).zip)) : []);
  return Math.max(...span(all).map(Math.abs));
}

function zipPanel(cell, k, most) {
  const found = parts(cell, k);
  if (!found.zip) return null;
  const ends = unpack(found.zip), count = ends.length / 2, method = cell.methods[k];
  const covered = view(cell, k, chosen.level, shownName(cell, k));
  return {
    title: `${data.methods[method]}, ${shownName(cell, k)}: ${percent(covered.coverage, covered.error)}`,
    draw: (svg, width) => {
      const top = 24, bottom = 250, left = 46;
      const x = scale([-most, most], [left, width - RIGHT]), y = scale([0, 100], [bottom, top]), points = [];
      const inside = (value) => Math.max(left, Math.min(width - RIGHT, x(value)));
      axisY(svg, left, y, "Rank of |error| / half-width (%)", width - RIGHT);
      const thick = Math.max(1, (bottom - top) / count - 0.7);
      for (let i = 0; i < count; i++) {
        const [a, b] = [ends[2 * i], ends[2 * i + 1]], at = y((100 * (i + 0.5)) / count), misses = a > 0 || b < 0;
        svg.append(shape("path", { d: `M${inside(a).toFixed(1)},${at.toFixed(1)}H${inside(b).toFixed(1)}`, class: misses ? "misses" : "holds", "stroke-width": thick }));
        points.push({ x: inside((a + b) / 2), y: at, text: `${misses ? "misses" : "holds"} the truth: from ${number(a)} to ${number(b)} around it` });
      }
      svg.append(
        shape("path", { d: `M${x(0)},${top}V${bottom}`, class: "truth" }),
        shape("path", { d: `M${left},${y(100 * level())}H${width - RIGHT}`, class: "nominal" }));
      axisX(svg, x, bottom, "Interval less truth");
      return { height: 292, points, name: "Zip plot." };
    },
  };
}

// Without the few that would squeeze the rest.
function bounded(values) {
  const sorted = [...values].filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  const most = 1.5 * (sorted[Math.floor(sorted.length * 0.95)] || 1);
  return [...values].map((value) => Math.max(-most, Math.min(most, value)));
}

function normalPanel(cell, k) {
  const found = parts(cell, k);
  if (!found.normal) return null;
  const values = [...unpack(found.normal)], method = cell.methods[k];
  const points = values.map((y, i) => {
    const x = probit((i + 0.5) / values.length);
    return { x, y, text: `quantile ${(100 * (i + 0.5) / values.length).toFixed(0)} %: ${number(y)}, normal ${number(x)}` };
  });
  const ends = span(points.flatMap((p) => [p.x, p.y]));
  return { title: `${data.methods[method]}, ${shownName(cell, k)}`, draw: plot([{ look: hue(method), points, size: 2.5 }], { xs: ends, ys: ends, xLabel: "Normal quantile", yLabel: "(Estimate − truth) / SD", diagonal: true, joined: false }) };
}

function lengthPanel(cell) {
  const series = cell.methods.map((method, k) => {
    const found = parts(cell, k);
    const values = found.length ? [...unpack(found.length)] : [];
    return {
      look: hue(method), plain: true,
      points: values.map((x, i) => ({ x, y: (100 * (i + 0.5)) / values.length, text: `${data.methods[method]}: ${(100 * (i + 0.5) / values.length).toFixed(0)} % of lengths are below ${number(x)}` })),
    };
  }).filter((one) => one.points.length);
  if (!series.length) return null;
  const xs = span(series.flatMap((one) => one.points.map((p) => p.x)), { log: true, pad: 0.03 });
  return { title: `All methods, ${shownName(cell, 0)}`, draw: plot(series, { xs, ys: [0, 100], logX: true, xLabel: "Length", yLabel: "Share of intervals that are shorter (%)" }) };
}

// Acklam's rational approximation, to nine digits.
function probit(p) {
  const a = [-39.69683028665376, 220.9460984245205, -275.9285104469687, 138.357751867269, -30.66479806614716, 2.506628277459239];
  const b = [-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972, -13.28068155288572];
  const c = [-0.007784894002430293, -0.3223964580411365, -2.400758277161838, -2.549732539343734, 4.374664141464968, 2.938163982698783];
  const d = [0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416];
  const horner = (k, x) => k.reduce((sum, one) => sum * x + one, 0);
  if (p > 0.97575) return -probit(1 - p);
  if (p < 0.02425) { const q = Math.sqrt(-2 * Math.log(p)); return horner(c, q) / horner([...d, 1], q); }
  const q = p - 0.5;
  return (horner(a, q * q) * q) / horner([...b, 1], q * q);
}

function drawZip() {
  const select = document.querySelector("#zip select");
  const cell = data.cells[Number(select.value)];
  const shown = cell ? cell.methods.map((_, k) => k).filter((k) => visible(cell.methods[k]) && parts(cell, k).zip) : [];
  figure("zip", shown.map((k) => zipPanel(cell, k, zipWidth(cell))), { rows: () => shown.flatMap((k) => {
    const ends = unpack(parts(cell, k).zip);
    return Array.from({ length: ends.length / 2 }, (_, i) => ({
      ...where(cell), method: data.methodNames[cell.methods[k]], level: level(), coordinate: shownName(cell, k),
      rank: (i + 0.5) / (ends.length / 2), lower_less_truth: ends[2 * i], upper_less_truth: ends[2 * i + 1],
    }));
  }) });
  const some = data.details.some((methods) => methods.some((one) => one.of.some((part) => part.zip)));
  document.getElementById("zip").hidden = !some;
}

function openCell(cell, opener) {
  const dialog = document.getElementById("cell");
  const body = dialog.querySelector(".inside");
  dialog.querySelector("h2").textContent = cellName(cell);
  body.replaceChildren(...coordinateTable(cell), ...failureList(cell), replayCommand(cell));
  const views = Object.entries(NAMES).map(([kind, name]) => {
    const panels = kind === "length" ? [lengthPanel(cell)]
      : cell.methods.map((_, k) => kind === "zip" ? zipPanel(cell, k, zipWidth(cell)) : normalPanel(cell, k));
    return [name, panels.filter(Boolean)];
  });
  tip.hidden = true;
  dialog.showModal();
  for (const [name, panels] of views) {
    if (!panels.length) continue;
    const place = element("div", { class: "panels" });
    body.append(element("h3", {}, name), place);
    place.append(...panels.map(() => element("div", { class: "panel" })));
    panels.forEach((panel, i) => fill(place.children[i], panel, place.children[i].clientWidth || 340));
  }
  dialog.scrollTop = 0;
  dialog.querySelector("h2").focus();
  dialog.onclose = () => opener?.focus?.();
}

function coordinateTable(cell) {
  const names = ["mean over all", ...kept(cell, 0)];
  const head = element("tr", {}, element("th", { class: "left" }, "method"), ...names.map((name) => element("th", {}, name)));
  const lines = cell.methods.map((method, k) => {
    const texts = ["", ...kept(cell, k)].map((name) => {
      const v = view(cell, k, chosen.level, name);
      return element("td", {}, `${percent(v.coverage, v.error)}, ${number(v.length)}`);
    });
    return element("tr", {}, element("th", { class: "left", scope: "row" }, data.methods[method]), ...texts);
  });
  const caption = `Coverage of ${number(100 * level())} % intervals (standard error) and mean length, ${grouped(cell.n)} replications, ${grouped(cell.rounds)} rounds`;
  return [element("div", { class: "scroll", tabindex: 0 }, element("table", {}, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...lines)))];
}

function failureList(cell) {
  const lines = cell.methods.flatMap((method, k) => {
    const { failed, list } = data.details[cell.index][k];
    const causes = Object.entries(failed).map(([cause, count]) => `${grouped(count)} ${cause}`);
    return causes.length ? [element("li", {}, `${data.methods[method]}: ${causes.join(", ")} (first: replications ${list.join(", ")})`)] : [];
  });
  return [element("h3", {}, "Failures"), lines.length ? element("ul", {}, ...lines) : element("p", {}, "No replication failed.")];
}

function replayCommand(cell) {
  const failed = cell.methods.flatMap((_, k) => data.details[cell.index][k].list);
  const command = `${data.replay} --cell ${cell.id} --replication ${failed.length ? Math.min(...failed) : 0}`;
  const button = element("button", { type: "button", onclick: () => copy(command, button) }, "Copy");
  return element("p", {}, "Run one replication again: ", element("code", {}, command), " ", button);
}

async function copy(text, button) {
  try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
  catch { button.textContent = "Select it and copy by hand"; }
}
