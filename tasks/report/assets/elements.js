"use strict";
// Elements and texts. Everything that comes from data enters the page as text, never as HTML.

function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== ""));
  return node;
}

function table(heads, rows, options = {}) {
  const cells = (row, tag) => row.map((cell, column) =>
    element(tag, { class: options.numeric && column >= options.numeric ? "numeric" : "" }, cell ?? ""));
  return element("div", { class: "scroll" }, element("table", {},
    heads ? element("thead", {}, element("tr", {}, cells(heads, "th"))) : null,
    element("tbody", {}, rows.map(row => element("tr", {}, cells(row, "td"))))));
}

function section(id, title, ...children) {
  return element("section", { id }, element("h2", {}, title), ...children);
}

function card(title, ...children) {
  return element("div", { class: "card" }, title ? element("h3", {}, title) : null, ...children);
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// A number with four significant digits: 1,234,567 or 0.01234 or 1.2e-7.
function formatted(value, unit = "") {
  if (!isNumber(value)) return "–";
  if (unit === "share") return `${(100 * value).toLocaleString("en", { maximumSignificantDigits: 4 })} %`;
  const size = Math.abs(value);
  let text;
  if (size >= 1e9) text = `${(value / 1e9).toLocaleString("en", { maximumSignificantDigits: 4 })} B`;
  else if (size !== 0 && size < 1e-3) text = value.toExponential(3).replace(/\.?0+e/, "e");
  else if (size >= 1000) text = value.toLocaleString("en", { maximumFractionDigits: 0 });
  else text = value.toLocaleString("en", { maximumSignificantDigits: 4 });
  return unit ? `${text} ${unit}` : text;
}

// A tick of an axis: 12,500 or 1.5M or 5e-6.
function tick(value, unit = "") {
  if (value === null || value === undefined) return "";
  if (unit === "share") return `${+(100 * value).toPrecision(6)} %`;
  const size = Math.abs(value);
  for (const [factor, letter] of [[1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= factor) return `${+(value / (letter === "k" ? 1e3 : factor)).toPrecision(4)}${letter}`;
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(+value.toPrecision(6));
}

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 60) return `${+seconds.toPrecision(3)} s`;
  const total = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(total / 86400), Math.floor(total / 3600) % 24, Math.floor(total / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${total % 60} s`;
}

function fileSize(bytes) {
  if (!isNumber(bytes)) return "–";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6]]) {
    if (bytes >= size) return `${(bytes / size).toFixed(1)} ${unit}`;
  }
  return `${(bytes / 1e3).toFixed(1)} kB`;
}

function dateOf(seconds) {
  return seconds ? new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") + " UTC" : "–";
}

function shown(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

// The value of a colour of page.css, in the present theme.
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
