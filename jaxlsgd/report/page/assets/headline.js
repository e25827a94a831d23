// What came out, as `text.headline` writes it for the first level, for what the reader has chosen.
const MOST_CELLS = 60;
const bonferroni = (count) => probit(1 - 0.05 / (2 * Math.max(1, count)));

function rounded(x, error) {
  const places = error > 0 ? Math.min(2, Math.max(0, -Math.floor(Math.log10(error / 2)))) : 1;
  return x.toFixed(places);
}

function shareText(v) {
  const [p, error] = [100 * v.coverage, 100 * v.error];
  if (!Number.isFinite(p)) return "–";
  if (error > 0) return `${rounded(p, error)} (${rounded(error, error)})`;
  return `${p.toFixed(0)} [${(100 * v.low).toFixed(1)}, ${(100 * v.high).toFixed(1)}]`;
}

function shade(v, limit) {
  if (!Number.isFinite(v.score)) return "";
  if (v.score > limit) return "a";
  if (v.score >= -limit) return "k";
  const points = 100 * (level() - v.coverage);
  return `b${points > 15 ? 4 : points > 5 ? 3 : points > 2 ? 2 : 1}`;
}

function ratioText(v, base) {
  const ratio = v.length / base;
  return Number.isFinite(ratio) ? `×${rounded(ratio, Math.max(0.005, (ratio * v.lengthError) / v.length || 0))}` : "";
}

function keptText(group, limit) {
  const known = group.filter((v) => Number.isFinite(v.coverage));
  if (!known.length) return "–";
  const order = [...known].sort((a, b) => a.coverage - b.coverage);
  const ends = unique([order[0], order[order.length - 1]].map((v) => rounded(100 * v.coverage, 100 * v.error)));
  return `${known.filter((v) => Math.abs(v.score) <= limit).length} of ${known.length}: ${ends.join(" to ")} %`;
}

function drawHeadline(cells) {
  const place = document.querySelector("#out .tables");
  if (!place) return;
  const methods = data.methods.map((_, i) => i).filter(visible);
  const all = cells.map((cell) => new Map(views(cell).map((v) => [v.method, v])));
  const known = (method) => all.filter((here) => Number.isFinite(here.get(method)?.coverage)).length;
  const limit = bonferroni(Math.max(0, ...methods.map(known)));
  const algorithms = unique(cells.map((cell) => cell.algorithm));
  document.querySelector("#out .scope").textContent = scopeText(cells, methods.some(known));
  document.querySelector("#out .limit").textContent = limit.toFixed(1);
  const summary = methods.map((method) => [data.methods[method], ...algorithms.map((algorithm) =>
    keptText(all.filter((_, i) => cells[i].algorithm === algorithm).map((here) => here.get(method)).filter(Boolean), limit))]);
  const heads = algorithms.length > 1 ? algorithms : algorithms.map(() => "Cells that keep their level: lowest to highest coverage");
  place.querySelector(".summary").replaceChildren(element("table", {},
    element("thead", {}, element("tr", {}, element("th", { class: "left" }, "method"), ...heads.map((name) => element("th", {}, name)))),
    element("tbody", {}, ...summary.map(([name, ...texts]) =>
      element("tr", {}, element("td", { class: "left" }, name), ...texts.map((text) => element("td", {}, text)))))));
  place.querySelector(".matrix").replaceChildren(matrix(cells, all, methods, limit, place.dataset.all ? 2000 : MOST_CELLS));
  place.querySelector(".more")?.remove();
  if (cells.length > MOST_CELLS && !place.dataset.all) place.append(element("button", {
    type: "button", class: "more", onclick: () => { place.dataset.all = "1"; redraw(); },
  }, `Show more cells (${MOST_CELLS} of ${grouped(cells.length)} are shown)`));
  rowsOf.set("out", () => cells.flatMap(views).map((v) => ({ ...lengthRow(v), coverage_low: v.low, coverage_high: v.high })));
}

function scopeText(cells, known) {
  const counts = cells.flatMap((cell) => cell.names.map((name) => data.names[name].length));
  const ends = unique([Math.min(...counts), Math.max(...counts)]).join(" to ");
  const which = chosen.coordinate !== "" ? chosen.coordinate : ends === "1" ? "one coordinate" : `mean over all ${ends} coordinates`;
  const count = `${grouped(cells.length)} cell${cells.length === 1 ? "" : "s"}`;
  return `${number(100 * level())} % intervals, ${which}, ${count}.` + (known ? "" : " Coverage is unknown: no problem has a truth.");
}

function matrix(cells, all, methods, limit, most) {
  const lines = [];
  let shown = 0;
  for (const group of settings(cells)) {
    if (shown >= most) break;
    lines.push(element("tr", { class: "group" }, element("th", { class: "left", scope: "rowgroup", colspan: 1 + methods.length }, settingName(group[0]))));
    for (const cell of group.slice(0, most - shown)) {
      shown += 1;
      const here = all[cells.indexOf(cell)];
      const fair = [...here.values()].filter((v) => v.length > 0 && !(v.score < -limit)).map((v) => v.length);
      const base = fair.length ? Math.min(...fair) : NaN;
      const open = (event) => { if (event.type === "click" || event.key === "Enter") openCell(cell, row); };
      const row = element("tr", { tabindex: 0, onclick: open, onkeydown: open, title: `Open ${cellName(cell)}` },
        element("th", { class: "left", scope: "row" }, cell.schedule),
        ...methods.map((method) => here.has(method) ? entry(here.get(method), base, limit) : element("td")));
      lines.push(row);
    }
  }
  const head = element("tr", {}, element("th", { class: "left" }, "schedule"), ...methods.map((method) => element("th", { scope: "col" }, data.methods[method])));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines));
}

function entry(v, base, limit) {
  const kind = shade(v, limit), flag = { a: "▲ ", b: "▼ " }[kind[0]] ?? "", ratio = ratioText(v, base);
  const made = element("td", { class: kind, title: report(v) }, flag + shareText(v));
  if (ratio) made.append(" ", element("small", {}, ratio));
  return made;
}
