// A nested-loop plot (Rücker and Schwarzer, 2014): all cells in order, and below them what varies.
const FACTORS = [["problem", "problem"], ["algorithm", "algorithm"], ["steps", "steps"], ["schedule", "schedule"]];

function drawNested(cells) {
  const factors = FACTORS.filter(([key]) => unique(cells.map((cell) => cell[key])).length > 1);
  const place = (cell, key) => key === "steps" ? cell.steps : data[`${key}s`].indexOf(cell[key]);
  const ordered = [...cells].sort((a, b) => {
    for (const [key] of factors) { const d = place(a, key) - place(b, key); if (d) return d; }
    return 0;
  });
  const measure = document.querySelector("#nested input:checked").value;
  const worth = factors.length > 1 && cells.length > 3;
  figure("nested", worth ? [{ title: `${grouped(ordered.length)} cells in order`, draw: nestedPanel(ordered, factors, measure) }] : [],
    { rows: () => ordered.flatMap((cell) => views(cell).map(measure === "coverage" ? coverageRow : lengthRow)) });
}

function nestedPanel(cells, factors, measure) {
  return (svg, width) => {
    const left = Math.min(76, width * 0.2), top = 24, bottom = 250, right = width - 6;
    const coverage = measure === "coverage";
    const all = cells.map(views);
    const value = (v) => coverage ? 100 * v.coverage : v.length;
    const nominal = 100 * level();
    const ys = coverage ? coverageDomain(all.flat().map(value).filter(Number.isFinite)) : span(all.flat().map(value), { log: true });
    const y = scale(ys, [bottom, top], !coverage), x = scale([0, cells.length], [left, right]), points = [];
    axisY(svg, left, y, coverage ? "Coverage (%)" : "Mean length", right);
    if (coverage) svg.append(shape("path", { d: `M${left},${y(nominal)}H${right}`, class: "nominal" }));
    const dense = cells.length > 300; // risers would hide everything
    for (const method of unique(all.flat().map((v) => v.method))) {
      let d = "";
      all.forEach((here, i) => {
        const v = here.find((one) => one.method === method);
        if (!v || !Number.isFinite(value(v))) return;
        const from = x(i), to = x(i + 1), at = Math.min(bottom, y(value(v)));
        d += `${d && i && !dense && all[i - 1].some((one) => one.method === method) ? "L" : "M"}${from.toFixed(1)},${at.toFixed(1)}H${to.toFixed(1)}`;
        points.push({ x: (from + to) / 2, y: at, text: report(v), cell: v.cell });
        if (y(value(v)) > bottom + 0.5) svg.append(shape("path", { d: `M${(from + to) / 2 - 4},${bottom - 6}l4,5l4,-5`, class: `out ${look(hue(method))}` }));
        else if (cells.length <= 40) svg.append(mark(hue(method), (from + to) / 2, at, apart(v.score) !== "", 3));
      });
      svg.append(shape("path", { d: d || "M0,0", class: `line ${look(hue(method))}`, "stroke-dasharray": dense ? "" : DASHES[hue(method) % 8] }));
    }
    let at = bottom + 16;
    for (const [key, name] of factors) at = drawFactor(svg, cells, key, name, x, at, left);
    return { height: at + 6, points, name: "Nested-loop plot." };
  };
}

// One factor as a staircase of its values, named where there is room.
function drawFactor(svg, cells, key, name, x, top, left) {
  const values = unique(cells.map((cell) => cell[key]));
  const high = Math.min(40, 6 + 5 * values.length), step = (high - 6) / Math.max(1, values.length - 1);
  let d = "", before;
  cells.forEach((cell, i) => {
    const y = top + high - 3 - values.indexOf(cell[key]) * step;
    d += `${i ? "L" : "M"}${x(i).toFixed(1)},${y.toFixed(1)}H${x(i + 1).toFixed(1)}`;
  });
  svg.append(
    shape("path", { d, class: "stairs" }),
    shape("text", { x: left - 8, y: top + high / 2 + 4, class: "label end" }, name));
  let from = 0;
  cells.forEach((cell, i) => {
    if (i + 1 < cells.length && cells[i + 1][key] === cell[key]) return;
    const text = key === "steps" ? grouped(cell.steps) : String(cell[key]);
    if ((x(i + 1) - x(from)) > text.length * 6.4 + 4) {
      svg.append(shape("text", { x: (x(from) + x(i + 1)) / 2, y: top + high + 11, class: "label middle small" }, text));
      before = true;
    }
    from = i + 1;
  });
  return top + high + (before ? 20 : 8);
}
