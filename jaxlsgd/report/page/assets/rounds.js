// Along the communication rounds: coverage and length by method, L2 error by schedule.
function line(cell, k, column, factor = 1) {
  const where = place(cell, k), from = cell.at[k].path + where * cell.saves.length, start = cell.at[k].rounds;
  const value = (i) => column === "l2_error" ? rounds.l2_error[start + i] : where < 0 ? NaN : path[column][from + i];
  return cell.saves.map((round, i) => ({ x: round, y: factor * value(i), n: rounds.n_ok[start + i], cell }));
}

function drawRounds(cells) {
  const saved = cells.filter((cell) => cell.methods.some((_, k) => line(cell, k, "length").some((p) => Number.isFinite(p.y))));
  const measure = document.querySelector("#rounds input:checked").value;
  document.querySelector("#rounds .method-choice").hidden = measure !== "l2_error";
  const shared = measure === "coverage" ? coverageSpan(saved.slice(0, 100)) : null;
  const panels = measure === "l2_error" ? errorPanels(saved) : saved.map((cell) => roundsPanel(cell, measure, shared));
  figure("rounds", panels, { rows: () => saved.flatMap((cell) => cell.methods.flatMap((method, k) => visible(method)
    ? line(cell, k, measure).map((p) => ({ ...which({ cell, method }), save_round: p.x, n_ok: p.n, [measure]: p.y })) : [])) });
}

function roundsPanel(cell, measure, shared) {
  const coverage = measure === "coverage";
  return {
    title: cellName(cell),
    draw: later(() => {
      const series = cell.methods.map((method, k) => ({
        look: hue(method), method, plain: true,
        points: line(cell, k, measure, coverage ? 100 : 1).map((p) => ({ ...p, text: roundText(p, method, measure) })),
      })).filter((one) => visible(one.method));
      const values = series.flatMap((one) => one.points.map((p) => p.y));
      const nominal = 100 * level();
      const ys = shared ?? span(values, { log: true });
      const common = { xs: span(cell.saves, { log: true, pad: 0.02 }), ys, logX: true, xLabel: "Communication rounds" };
      return plot(series, coverage
        ? { ...common, yLabel: "Coverage (%)", line: nominal, band: exact(cell.n, views(cell)) }
        : { ...common, yLabel: "Mean length", logY: true });
    }),
  };
}

// The first rounds, where an interval may cover anything, do not decide the axis; arrows mark what leaves it.
function coverageSpan(cells) {
  const late = cells.flatMap((cell) => cell.methods.flatMap((method, k) =>
    visible(method) ? line(cell, k, "coverage", 100).slice(cell.saves.length >> 1).map((p) => p.y) : []));
  const [low, high] = span(late, { include: [100 * level() - 4, 100 * level() + 2] });
  return [Math.max(0, low, 100 * level() - DEEPEST), Math.min(100.5, high)];
}

function roundText(p, method, measure) {
  const value = measure === "coverage" ? `coverage ${number(p.y)} %`
    : `${measure === "length" ? "length" : "L2 error"} ${number(p.y)}`;
  return `${data.methods[method]}\n${cellName(p.cell)}\nround ${grouped(p.x)}: ${value}, ${grouped(p.n)} runs`;
}

function errorPanels(cells) {
  const method = Number(document.querySelector("#rounds select").value);
  return settings(cells.filter((cell) => cell.methods.includes(method))).map((group) => ({
    title: `${settingName(group[0])}: ${data.methods[method]}`,
    draw: later(() => {
      const series = group.map((cell) => ({
        look: data.schedules.indexOf(cell.schedule), plain: true, label: cell.schedule,
        points: line(cell, cell.methods.indexOf(method), "l2_error").map((p) => ({ ...p, text: roundText(p, method, "l2_error") })),
      }));
      const points = series.flatMap((one) => one.points);
      return plot(series, {
        xs: span(points.map((p) => p.x), { log: true, pad: 0.02 }), ys: span(points.map((p) => p.y), { log: true }),
        logX: true, logY: true, xLabel: "Communication rounds", yLabel: "L2 error",
      });
    }),
  }));
}
