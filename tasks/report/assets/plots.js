"use strict";
// Charts of metrics. All share their horizontal axis: its kind (steps, tokens or time), the cursor and the zoom.

const COLORS = 6;
const NOISY_POINTS = 20;
const HEIGHT = 230;  // pixels of a plot, without its legend
const PAPER = { width: 330, height: 150 };  // of a plot, two of which fit beside each other on A4 and Letter
const WARM_UP = 3;  // times as long as any other step: the first step is left out of the vertical range
const WHOLE = Array.from({ length: 40 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));  // between ticks
const view = { axis: "step", range: null, smoothing: 30 };
const charts = [];  // every plot, as `manage` returns it

let timeUnit = [1, "seconds"];

function setTimeUnit(runs) {
  const longest = Math.max(0, ...runs.map(run => run.curves.elapsed?.values.at(-1) ?? 0));
  timeUnit = longest > 7200 ? [3600, "hours"] : longest > 120 ? [60, "minutes"] : [1, "seconds"];
}

// Positions on the horizontal axis for steps of a run.
function positions(run, steps) {
  if (view.axis === "step") return steps;
  const curve = run.curves[view.axis];
  if (!curve) return steps;
  const factor = view.axis === "elapsed" ? 1 / timeUnit[0] : 1;
  return steps.map(step => factor * interpolated(curve, step));
}

function interpolated(curve, step) {
  const { steps, values } = curve;
  let low = 0, high = steps.length - 1;
  if (step <= steps[0]) return values[0] * (steps[0] > 0 ? step / steps[0] : 1);
  if (step >= steps[high]) return values[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  const share = (step - steps[low]) / (steps[high] - steps[low]);
  return values[low] + share * (values[high] - values[low]);
}

function isNoisy(values) {
  if (values.length < NOISY_POINTS) return false;
  let variation = 0, least = values[0], greatest = values[0];
  for (let i = 1; i < values.length; i++) {
    variation += Math.abs(values[i] - values[i - 1]);
    least = Math.min(least, values[i]);
    greatest = Math.max(greatest, values[i]);
  }
  return variation > 3 * (greatest - least);
}

// Centred means over a share of the points; fewer near both ends.
function smooth(values, smoothing) {
  const half = Math.round(values.length * smoothing / 1000);
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, i) => {
    const first = Math.max(0, i - half), end = Math.min(values.length, i + half + 1);
    return (sums[end] - sums[first]) / (end - first);
  });
}

function shade(hex, alpha) {
  return hex + Math.round(255 * alpha).toString(16).padStart(2, "0");
}

// Curves of a chart: [{ label, x, y, color, width, alpha, dash, points, band, isHidden }].
function curvesOf(spec, runs) {
  const curves = [];
  runs.forEach((run, number) => {
    spec.lines.forEach((name, line) => {
      const curve = run.curves[name];
      if (!curve?.steps.length) return;
      const isEvaluation = name.startsWith("eval_");
      const index = runs.length > 1 ? number : line;
      const own = { color: `series${index % COLORS}`, x: positions(run, curve.steps), label: labelOf(spec, name, run, runs) };
      const dash = runs.length > 1 && line > 0 ? [6, 4] : null;
      if (line === 0) curves.push(...bandOf(spec, run, curve, own));
      if (!isEvaluation && view.smoothing > 0 && isNoisy(curve.values)) {
        curves.push({ ...own, y: curve.values, width: 1, alpha: 0.28, isPale: true });
        curves.push({ ...own, y: smooth(curve.means ?? curve.values, view.smoothing), width: 2, alpha: 1, dash });
      } else {
        curves.push({ ...own, y: curve.values, width: 2, alpha: 1, dash, points: isEvaluation || curve.steps.length === 1 });
      }
    });
  });
  return curves;
}

function labelOf(spec, name, run, runs) {
  const short = spec.lines.length === 1 && name === spec.lines[0] ? "" : name;
  return runs.length > 1 ? [run.label, short].filter(Boolean).join(" ") : name;
}

// A standard deviation around a curve, or the metrics that bound it: an invisible lower and upper edge.
function bandOf(spec, run, curve, own) {
  let edges = [];
  if (spec.spread && run.curves[spec.spread]) {
    const spread = curve.steps.map(step => interpolated(run.curves[spec.spread], step));
    edges = [curve.values.map((value, i) => value - spread[i]), curve.values.map((value, i) => value + spread[i])];
    if (isNoisy(curve.values) && view.smoothing) edges = edges.map(edge => smooth(edge, view.smoothing));
    return edges.map(y => ({ ...own, y, isEdge: true }));
  }
  const limits = spec.limits.map(name => run.curves[name]).filter(limit => limit?.steps.length);
  if (limits.length === 1) limits.unshift(curve);
  return limits.map(limit => ({ ...own, x: positions(run, limit.steps), y: limit.values, isEdge: true }));
}

function chart(spec, runs) {
  const box = element("div", { class: "plot" });
  const log = element("button", { type: "button", class: "small", title: "Logarithmic scale" }, "log");
  const subtitle = spec.spread ? "band: standard deviation" : spec.limits.length ? "band: range" : "";
  const unit = spec.unit && spec.unit !== "share" ? `, ${spec.unit}` : "";
  const node = element("div", { class: "card chart" },
    element("h3", {}, spec.title + unit, element("small", {}, subtitle), log), box);
  let isLog = false;
  const managed = manage(box, () => {
    const curves = curvesOf(spec, runs);
    log.disabled = !isLog && !curves.some(curve => curve.y.some(value => value > 0));
    const tables = curves.map(curve => [curve.x, isLog ? curve.y.map(value => value > 0 ? value : null) : curve.y]);
    const data = tables.length ? uPlot.join(tables.map(unique)) : [[], []];
    return new uPlot(plotOptions(box, spec, curves, isLog), data, box);
  });
  log.onclick = () => {
    isLog = !isLog;
    log.classList.toggle("on", isLog);
    managed.rebuild();
  };
  return node;
}

// Keeps a plot as wide as its box, and builds it when the box is first seen. build: returns a new plot.
function manage(box, build, { followsRange = true, height = HEIGHT } = {}) {
  const self = { plot: null, followsRange };
  self.rebuild = (width = box.clientWidth) => {
    self.plot?.destroy();
    self.plot = null;
    if (!width) return;  // in a closed part of the page
    self.plot = build();
    if (self.plot.width !== width) self.resize(width);
    if (view.range && followsRange) self.plot.setScale("x", { min: view.range[0], max: view.range[1] });
  };
  self.resize = (width = box.clientWidth) => {
    if (!width) return;
    if (!self.plot) self.rebuild(width);
    else if (self.plot.width !== width) self.plot.setSize({ width, height: isOnPaper() ? PAPER.height : height });
  };
  // In the next frame, since a plot changes the height of what is observed.
  new ResizeObserver(() => requestAnimationFrame(() => { if (!isOnPaper()) self.resize(); })).observe(box);
  charts.push(self);
  return self;
}

// uPlot.join needs rising positions; several steps may have the same number of tokens.
function unique([x, y]) {
  const xs = [], ys = [];
  x.forEach((value, i) => {
    if (xs.length && value <= xs.at(-1)) ys[ys.length - 1] = y[i];
    else { xs.push(value); ys.push(y[i]); }
  });
  return [xs, ys];
}

function plotOptions(box, spec, curves, isLog) {
  const series = curves.map(curve => ({
    label: curve.label,
    stroke: () => curve.isEdge ? "transparent" : shade(color(curve.color), curve.alpha),
    width: curve.isEdge ? 0 : curve.width,
    dash: curve.dash ?? undefined,
    spanGaps: true,
    points: { show: Boolean(curve.points), size: 6, fill: () => color(curve.color) },
    value: (plot, value) => formatted(value, spec.unit === "share" ? "share" : ""),
  }));
  const bands = [];
  curves.forEach((curve, i) => {
    if (curve.isEdge && curves[i + 1]?.isEdge && curves[i + 1].color === curve.color) {
      bands.push({ series: [i + 2, i + 1], fill: () => shade(color(curve.color), 0.14) });
    }
  });
  const options = baseOptions(box, HEIGHT, value => tick(value, spec.unit));
  options.series.push(...series);
  options.bands = bands;
  options.scales.y = isLog ? { distr: 3 } : { range: spec.unit === "s" ? rangeOfTimes : yRange };
  // Pale curves and edges of bands have no entry of their own in the legend.
  options.hooks.init = [plot => plot.root.querySelectorAll(".u-legend .u-series").forEach((row, i) => {
    const curve = curves[i - 1];
    if (curve) row.hidden = Boolean(curve.isPale || curve.isEdge);
    const marker = row.querySelector(".u-marker");
    if (curve && marker) marker.style.borderColor = `var(--${curve.color})`;
  })];
  options.hooks.setLegend = [showRawValues(curves, series)];
  options.cursor.points.size = (plot, series) => curves[series - 1]?.isEdge ? 0 : 6;
  return options;
}

// The legend of a smoothed curve also has the value itself.
function showRawValues(curves, series) {
  return plot => {
    curves.forEach((curve, i) => {
      if (!curve.isPale || !plot.legend.live) return;
      const cell = plot.root.querySelectorAll(".u-legend .u-series")[i + 2]?.querySelector(".u-value");
      const index = plot.legend.idxs?.[i + 1];
      const value = isNumber(index) ? plot.data[i + 1][index] : null;
      if (cell && isNumber(value)) cell.textContent += ` (${series[i].value(plot, value)})`;
    });
  };
}

function yRange(plot, least, greatest) {
  if (least === null || least === undefined) return [0, 1];
  if (least === greatest) return least === 0 ? [0, 1] : [least - Math.abs(least) * 0.1, greatest + Math.abs(greatest) * 0.1];
  const margin = 0.06 * (greatest - least);
  const low = least >= 0 && least - margin < 0.15 * (greatest - least) ? Math.min(0, least) : least - margin;
  return [low, greatest + margin];
}

// From 0, without the first step, which takes far longer than the others since kernels are chosen and compiled.
function rangeOfTimes(plot, least, greatest) {
  let rest = 0;
  for (const values of plot.data.slice(1)) {
    for (let i = Math.max(1, plot.series[0].idxs[0]); i <= plot.series[0].idxs[1]; i++) rest = Math.max(rest, values[i] ?? 0);
  }
  return [0, 1.06 * ((rest > 0 && greatest > WARM_UP * rest ? rest : greatest) || 1)];
}

// Options that every plot over steps shares.
function baseOptions(box, height, yTick) {
  const axis = { stroke: () => color("muted"), grid: { stroke: () => color("grid"), width: 1 }, ticks: { show: false },
    font: "11px system-ui, sans-serif" };
  const label = view.axis === "elapsed" ? timeUnit[1] : view.axis;
  return {
    width: box.clientWidth,
    height,
    scales: { x: { time: false, range: (plot, least, greatest) => [least ?? 0, greatest > least ? greatest : (least ?? 0) + 1] } },
    axes: [
      { ...axis, size: 28, space: 60, values: (plot, values) => values.map(value => tick(value)),
        ...(view.axis === "elapsed" ? {} : { incrs: WHOLE }) },
      { ...axis, size: 58, space: 34, values: (plot, values) => values.map(yTick) },
    ],
    series: [{ label, value: (plot, value) => formatted(value) }],
    legend: { live: true },
    cursor: {
      sync: { key: "report", setSeries: false },
      y: false,
      drag: { x: true, y: false, setScale: false },
      focus: { prox: 24 },
      // Thinned curves have points at different steps: the nearest one is shown.
      dataIdx: nearestPoint,
      bind: { dblclick: () => () => setRange(null) },
      points: { size: 6 },
    },
    focus: { alpha: 1 },
    hooks: { ready: [showLast], setCursor: [plot => { if (plot.cursor.left < 0) showLast(plot); }], setSelect: [plot => {
      const { left, width } = plot.select;
      if (width < 4) return;
      plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      setRange([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    }] },
  };
}

// Without a cursor the legend has the last values.
function showLast(plot) {
  const last = plot.data[0].length - 1;
  if (last >= 0) plot.setLegend({ idxs: plot.data.map((_, series) => nearestPoint(plot, series, last, plot.data[0][last])) });
}

function nearestPoint(plot, series, index, x) {
  const values = plot.data[series], xs = plot.data[0];
  if (series === 0 || isNumber(values?.[index])) return index;
  let left = index, right = index;
  while (left >= 0 && !isNumber(values[left])) left--;
  while (right < values.length && !isNumber(values[right])) right++;
  if (left < 0) return right < values.length ? right : null;
  if (right >= values.length) return left;
  return x - xs[left] <= xs[right] - x ? left : right;
}

function setRange(range) {
  view.range = range;
  document.getElementById("reset").hidden = !range;
  for (const { plot, followsRange } of charts) {
    if (!plot || !followsRange || !plot.data[0].length) continue;
    const [min, max] = range ?? [plot.data[0][0], plot.data[0].at(-1)];
    plot.setScale("x", { min, max });
  }
}

function rebuildCharts() {
  for (const each of charts) each.rebuild();
}

function redrawCharts() {
  for (const each of charts) each.plot?.redraw(false);
}
