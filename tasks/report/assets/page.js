"use strict";
// Puts the page together, and makes its controls work.

const content = JSON.parse(document.getElementById("content").textContent);
const runs = content.runs;
const THEME = "megaswift-report-theme";

function labelRuns() {
  const short = runs.map(run => run.name.split("/").at(-1));
  const parents = new Set(runs.map(run => run.name.split("/")[0]));
  runs.forEach((run, i) => { run.label = parents.size > 1 ? run.name : short[i]; });
}

function topicSection(topic, number) {
  const grid = element("div", { class: "charts" });
  const build = () => {
    if (!grid.children.length) grid.append(...topic.charts.map(spec => chart(spec, runs)));
  };
  const id = `topic${number}`;
  if (topic.title !== "Other metrics") {
    build();
    return section(id, topic.title, grid);
  }
  const node = details(`${topic.title} (${topic.charts.length})`, grid);
  node.addEventListener("toggle", build);
  node.prepare = () => { node.open = true; build(); };  // for paper
  return element("section", { id }, node);
}

function buildPage() {
  labelRuns();
  setTimeUnit(runs);
  document.getElementById("name").textContent = runs.map(run => run.label).join(" · ");
  const topics = content.topics.map(topicSection);
  const sections = [overviewSection(runs, content.made), ...topics, phaseSection(runs), completionsSection(runs),
    repliesSection(runs), dataSection(runs), runSection(runs)].filter(Boolean);
  // Other metrics are the last of the curves, and follow what is looked at more often.
  const other = sections.findIndex(node => node.querySelector(":scope > details")?.prepare);
  if (other >= 0) sections.splice(-1, 0, ...sections.splice(other, 1));
  document.getElementById("main").append(...sections);
  document.getElementById("sections").append(...sections.map(node => {
    const title = node.querySelector("h2")?.textContent ?? (node.id === "overview" ? "Overview" : "Other");
    return element("a", { href: `#${node.id}` }, title);
  }));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  redrawCharts();
}

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function connectControls() {
  const smoothing = document.getElementById("smoothing");
  smoothing.value = view.smoothing;
  smoothing.oninput = () => { view.smoothing = Number(smoothing.value); rebuildCharts(); };
  const axis = document.getElementById("axis");
  axis.onchange = () => { view.axis = axis.value; view.range = null; setRange(null); rebuildCharts(); };
  document.getElementById("reset").onclick = () => setRange(null);
  document.getElementById("theme").onclick = () => {
    setTheme(isDark() ? "light" : "dark");
    try { localStorage.setItem(THEME, document.documentElement.dataset.theme); } catch { /* not for file: in some browsers */ }
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
}

function rememberedTheme() {
  try { return localStorage.getItem(THEME); } catch { return null; }
}

function isOnPaper() {
  return document.documentElement.classList.contains("paper");
}

addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  document.querySelectorAll("details").forEach(node => { node.prepare?.(); node.open = true; });
  for (const each of charts) each.resize(PAPER.width);
  redrawCharts();
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("paper");
  for (const each of charts) each.resize();
  redrawCharts();
});

if (rememberedTheme()) document.documentElement.dataset.theme = rememberedTheme();
buildPage();
connectControls();
