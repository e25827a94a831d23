// Choices, and drawing again when they change.
function redraw() {
  tip.hidden = true;
  const cells = cellsChosen();
  document.getElementById("nothing").hidden = cells.length > 0;
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
  const select = element("select", { onchange: () => {
    chosen[key] = key === "level" ? Number(select.value) : select.value;
    redraw();
  } });
  if (all) select.append(element("option", { value: "" }, "all"));
  values.forEach((value, i) => select.append(element("option", { value: key === "level" ? i : value }, text(value))));
  return [element("label", {}, `${name} `, select)];
}

function legend() {
  return data.methods.map((name, method) => {
    const button = element("button", {
      type: "button", class: "method", "aria-pressed": "true",
      onclick: () => {
        chosen.hidden.has(method) ? chosen.hidden.delete(method) : chosen.hidden.add(method);
        button.setAttribute("aria-pressed", String(visible(method)));
        redraw();
      },
    }, swatch(method), name);
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

function start() {
  if (!last.coverage.some(Number.isFinite)) withoutTruth();
  const values = (key) => unique(data.cells.map((cell) => cell[key]));
  document.getElementById("choices").append(
    ...choice("problem", "Problem", values("problem")),
    ...choice("algorithm", "Algorithm", values("algorithm")),
    ...choice("steps", "Steps", values("steps").sort((a, b) => a - b), grouped),
    ...choice("schedule", "Schedule", values("schedule")),
    ...choice("level", "Level", data.levels, (x) => `${number(100 * x)} %`, false),
    element("div", { class: "legend", role: "group", "aria-label": "Methods" }, ...legend()));
  for (const caption of document.querySelectorAll("figure figcaption")) {
    if (data.partial) caption.prepend(element("strong", { class: "partial" }, `${data.partial} `));
  }
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

if (data.cells.length) start();
else document.documentElement.dataset.ready = "1";
