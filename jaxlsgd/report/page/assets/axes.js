// Scales and axes.
function scale(domain, range, log = false) {
  const f = log ? Math.log10 : (x) => x;
  const [a, b] = domain.map(f);
  const make = (x) => range[0] + ((f(x) - a) / (b - a || 1)) * (range[1] - range[0]);
  return Object.assign(make, { domain, range, log });
}

// The span of some numbers, a little wider, never empty.
function span(values, { log = false, include = [], pad = 0.06 } = {}) {
  const known = [...values, ...include].filter((x) => Number.isFinite(x) && (!log || x > 0));
  if (!known.length) return log ? [0.1, 1] : [0, 1];
  let low = known[0], high = known[0];
  for (const x of known) { if (x < low) low = x; if (x > high) high = x; }
  if (log) {
    const ratio = Math.max(high / low, 1.2) ** pad;
    return [low / ratio, high * ratio];
  }
  const room = (high - low || Math.abs(high) || 1) * pad;
  return [low - room, high + room];
}

function ticks(domain, log, count) {
  return log ? logTicks(domain, count) : linearTicks(domain, count);
}

function linearTicks([low, high], count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

function logTicks([low, high], count) {
  for (const parts of [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++) {
      for (const part of parts) {
        const x = Number((part * 10 ** k).toPrecision(12));
        if (x >= low && x <= high) found.push(x);
      }
    }
    if (found.length <= count && found.length >= 2) return found;
    if (found.length < 2) return linearTicks([low, high], count);
    if (parts.length === 1) {
      const skip = Math.ceil(found.length / count);
      return found.filter((_, i) => i % skip === 0);
    }
  }
  return [];
}

function axisX(svg, x, y, label, format = number) {
  const [left, right] = x.range;
  for (const value of ticks(x.domain, x.log, Math.max(2, (right - left) / 70))) {
    const at = x(value);
    svg.append(
      shape("path", { d: `M${at},${y}v4`, class: "tick" }),
      shape("text", { x: at, y: y + 15, class: "label middle" }, format(value)));
  }
  svg.append(
    shape("path", { d: `M${left},${y}H${right}`, class: "axis" }),
    shape("text", { x: (left + right) / 2, y: y + 32, class: "label middle title" }, label));
}

function axisY(svg, x, y, label, right, format = number) {
  const [bottom, top] = y.range;
  for (const value of ticks(y.domain, y.log, Math.max(2, (bottom - top) / 40))) {
    const at = y(value);
    svg.append(
      shape("path", { d: `M${x},${at}H${right}`, class: "grid" }),
      shape("text", { x: x - 6, y: at + 4, class: "label end" }, format(value)));
  }
  svg.append(shape("text", { x: 0, y: Math.min(12, top - 10), class: "label title" }, label));
}
