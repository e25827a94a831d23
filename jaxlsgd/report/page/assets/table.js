// The table of `jaxlsgd table`: its texts as they are, sorted, filtered and a page at a time.
const PAGE = window.innerWidth < 760 ? 25 : 50;
const sorting = { column: -1, down: false };
let linesShown = PAGE, words = "";

// Lines stand in the order of the columns: cells, methods, levels, coordinates.
const lines = [];
for (const cell of data.cells) {
  cell.methods.forEach((method, k) => data.levels.forEach((_, j) => data.names[cell.names[k]].slice(0, data.table.listed).forEach((coordinate) => {
    const texts = data.table.lines[lines.length];
    lines.push({ texts, cell, method, k, level: j, coordinate, key: texts.join(" ").toLowerCase() + ` ${data.methods[method].toLowerCase()} ${cell.id}` });
  })));
}

const numeric = (text) => { const x = parseFloat(text.replaceAll(",", "")); return Number.isNaN(x) ? null : x; };

function sorted(found) {
  const { column, down } = sorting;
  if (column < 0) return found;
  const left = data.table.left.includes(column), sign = down ? -1 : 1;
  const keys = new Map(found.map((line) => [line, left ? line.texts[column] : numeric(line.texts[column])]));
  return [...found].sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    if (x === null && y === null) return sign * a.texts[column].localeCompare(b.texts[column], "en");
    if (x === null || y === null) return (x === null) - (y === null); // unknown ones last
    return sign * (left ? x.localeCompare(y, "en", { numeric: true }) : x - y);
  });
}

function drawTable(cells) {
  const place = document.querySelector("#numbers .scroll");
  if (!lines.length) return;
  const inside = new Set(cells), wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const off = document.querySelector("#numbers .only").checked;
  const found = sorted(lines.filter((line) => inside.has(line.cell) && visible(line.method)
    && (chosen.coordinate === "" || data.table.listed === 1 || line.coordinate === chosen.coordinate)
    && wanted.every((word) => line.key.includes(word))
    && (!off || apart(view(line.cell, line.k, line.level, line.coordinate).score))));
  const table = place.querySelector("table");
  table.tHead.replaceChildren(element("tr", {}, ...data.table.header.map(headCell)));
  table.tBodies[0].replaceChildren(...found.slice(0, linesShown).map(tableLine));
  document.querySelector("#numbers .count").textContent =
    `${grouped(Math.min(linesShown, found.length))} of ${grouped(found.length)} lines` +
    (found.length < lines.length ? `, chosen from ${grouped(lines.length)}` : "");
  document.querySelector("#numbers .more").hidden = linesShown >= found.length;
}

function headCell(name, i) {
  const sort = sorting.column !== i ? "none" : sorting.down ? "descending" : "ascending";
  const arrow = { none: "", ascending: " ↑", descending: " ↓" }[sort];
  const press = () => {
    if (sorting.column !== i) Object.assign(sorting, { column: i, down: false });
    else if (!sorting.down) sorting.down = true;
    else sorting.column = -1;
    drawTable(cellsChosen());
    document.querySelectorAll("#numbers thead button")[i].focus();
  };
  return element("th", { scope: "col", "aria-sort": sort, class: data.table.left.includes(i) && "left" },
    element("button", { type: "button", onclick: press }, name + arrow));
}

const coverageColumn = data.table.header.indexOf("coverage %");

function tableLine(line) {
  const side = apart(view(line.cell, line.k, line.level, line.coordinate).score);
  const cells = line.texts.map((text, i) => {
    const cell = element("td", { class: [data.table.left.includes(i) && "left", i === coverageColumn && side].filter(Boolean).join(" ") || false });
    if (i === coverageColumn && side) cell.append(
      element("span", { class: "flag", "aria-hidden": "true" }, side === "below" ? "▼" : "▲"),
      element("span", { class: "unseen" }, `${side} its level: `));
    cell.append(element("span", { class: "value" }, text));
    return cell;
  });
  const open = (event) => { if (event.type === "click" || event.key === "Enter") openCell(line.cell, row); };
  const row = element("tr", { tabindex: 0, onclick: open, onkeydown: open, title: `Open ${cellName(line.cell)}` }, ...cells);
  return row;
}

function startTable() {
  document.querySelector("#numbers input[type=search]").addEventListener("input", (event) => {
    words = event.target.value;
    linesShown = PAGE;
    drawTable(cellsChosen());
  });
  document.querySelector("#numbers .only").addEventListener("change", () => drawTable(cellsChosen()));
  document.querySelector("#numbers .more").addEventListener("click", () => { linesShown *= 4; drawTable(cellsChosen()); });
}
