"use strict";
// Time by phase: bars of the whole run, and stacked areas of a step.

const PHASE_COLORS = 8;

function phaseColors(runs) {
  const names = [...new Set(runs.flatMap(run => [...Object.keys(run.phases.seconds), ...Object.keys(run.phases.totals)]))];
  names.sort((a, b) => (b === "training") - (a === "training"));
  return Object.fromEntries(names.map((name, i) => [name, `phase${i % PHASE_COLORS}`]));
}

function phaseSection(runs) {
  const withPhases = runs.filter(run => run.phases.steps.length);
  if (!withPhases.length) return null;
  const colors = phaseColors(withPhases);
  return section("time", "Time",
    withPhases.map(run => card(runs.length > 1 ? run.label : "The whole run", totalsBar(run, colors))),
    element("div", { class: "charts" }, withPhases.map(run => stackedChart(run, runs, colors))));
}

function totalsBar(run, colors) {
  const entries = Object.entries(run.phases.totals).sort((a, b) => b[1] - a[1]);
  const total = entries.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  const bar = element("div", { class: "bar" });
  const legend = element("ul", { class: "legend" });
  for (const [name, seconds] of entries) {
    const text = `${name}: ${duration(seconds)}, ${formatted(seconds / total, "share")}`;
    const part = element("span", { title: text });
    part.style.flexGrow = seconds / total;
    part.style.background = `var(--${colors[name]})`;
    bar.append(part);
    const marker = element("i");
    marker.style.background = `var(--${colors[name]})`;
    legend.append(element("li", {}, marker, `${name} `, element("b", {}, formatted(seconds / total, "share")),
      element("small", {}, ` ${duration(seconds)}`)));
  }
  return element("div", {}, bar, legend);
}

function stackedChart(run, runs, colors) {
  const names = Object.keys(run.phases.seconds).filter(name => run.phases.seconds[name].some(value => value > 0));
  names.sort((a, b) => (b === "training") - (a === "training"));  // at the bottom
  const box = element("div", { class: "plot" });
  const title = runs.length > 1 ? `Seconds per step: ${run.label}` : "Seconds per step, by phase";
  manage(box, () => {
    const sums = [];
    names.forEach((name, i) => sums.push(run.phases.seconds[name].map((value, k) => value + (i ? sums[i - 1][k] : 0))));
    const options = baseOptions(box, HEIGHT, value => tick(value));
    // Painted from the highest sum down, so that each area covers those above it.
    for (const name of [...names].reverse()) {
      options.series.push({ label: name, width: 0, stroke: () => color(colors[name]), fill: () => color(colors[name]),
        points: { show: false },
        value: (plot, value, series, index) => isNumber(index) ? duration(run.phases.seconds[name][index]) : "–" });
    }
    options.scales.y = { range: rangeOfTimes };
    return new uPlot(options, [positions(run, run.phases.steps), ...sums.reverse()], box);
  });
  return element("div", { class: "card chart" }, element("h3", {}, title), box);
}
