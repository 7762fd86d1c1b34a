"use strict";
// The prepared data: sources, dropped rows, and the histogram of lengths.

function dataSection(runs) {
  const cards = runs.flatMap(run => [["train", "Training data"], ["val", "Evaluation data"]]
    .filter(([name]) => run.data[name])
    .map(([name, title]) => dataCard(run.data[name], runs.length > 1 ? `${title}: ${run.label}` : title)));
  if (!cards.length) return null;
  const texts = runs.filter(run => run.data.text)
    .map(run => details(runs.length > 1 ? `As printed: ${run.label}` : "As printed, with the first sample", element("pre", {}, run.data.text)));
  return section("data", "Data", element("div", { class: "wide charts" }, cards), texts);
}

function dataCard(data, title) {
  const quantiles = data.lengths?.quantiles ?? {};
  const facts = [["samples", data.samples], ["tokens", data.tokens],
    ["trained tokens", isNumber(data.trained_tokens) ? formatted(data.trained_tokens / data.tokens, "share") : undefined],
    ["documents", data.documents], ["visual tokens", data.visual_tokens],
    ...Object.entries(data.media ?? {}).filter(([, count]) => count).map(([kind, count]) => [`${kind}s`, count])];
  const line = facts.filter(([, value]) => value !== undefined)
    .map(([label, value]) => element("span", {}, element("b", {}, isNumber(value) ? formatted(value) : value), ` ${label}`));
  return card(title, element("p", { class: "facts" }, data.is_streamed ? element("span", {}, "streamed") : line),
    data.lengths ? histogram(data.lengths) : null,
    data.lengths ? element("p", { class: "facts muted" }, Object.entries(quantiles)
      .map(([name, value]) => element("span", {}, `${name} `, element("b", {}, formatted(Math.round(value)))))) : null,
    sourcesTable(data.sources));
}

function sourcesTable(sources) {
  const dropped = sources.flatMap(source => (source.dropped ?? []).map(reason =>
    [source.name, reason.reason, formatted(reason.rows), reason.places.join(", ")]));
  return element("div", {},
    table(["source", "rows", "samples"], sources.map(source =>
      [source.name, formatted(source.rows), formatted(source.samples)]), { numeric: 1 }),
    dropped.length ? element("div", {}, element("h4", {}, "Dropped rows"), table(["source", "reason", "rows", "such as"], dropped)) : null);
}

function histogram({ start, width, counts }) {
  const box = element("div", { class: "plot" });
  const edges = counts.map((_, i) => start + i * width);
  manage(box, () => {
    const options = baseOptions(box, 170, value => tick(value));
    options.scales.x.range = () => [start - width * 0.5, start + (counts.length + 0.5) * width];
    options.scales.y = { range: (plot, least, greatest) => [0, 1.05 * (greatest || 1)] };
    options.cursor = { drag: { x: false, y: false }, points: { show: false }, y: false };
    options.series = [
      { label: "tokens", value: (plot, value) => isNumber(value) ? (width > 1 ? `${formatted(value)} to ${formatted(value + width - 1)}` : formatted(value)) : "–" },
      { label: "samples", stroke: () => color("series0"), fill: () => shade(color("series0"), 0.55), width: 1,
        paths: uPlot.paths.bars({ size: [0.92, 60], align: 1 }), points: { show: false }, value: (plot, value) => formatted(value) },
    ];
    options.hooks = {};
    return new uPlot(options, [edges, counts], box);
  }, { followsRange: false, height: 170 });
  return element("div", {}, element("h4", {}, "Lengths of samples, in tokens"), box);
}
