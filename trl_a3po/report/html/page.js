"use strict";
// The charts of the page, and the sample browser. Everything that a run holds enters the page as text (`textContent`).

// --- charts ---------------------------------------------------------------------------------------------------------

const CHARTS = JSON.parse(document.getElementById("charts").textContent);
const DARK = matchMedia("(prefers-color-scheme: dark)");
const NARROW = matchMedia("(max-width: 760px)");
const PRINTED_WIDTH = { wide: 700, half: 340 }; // CSS pixels: A4 and Letter without their margins

function coloured(value, style) {
  // `$name` is the page's colour of this name.
  if (typeof value === "string") return value.startsWith("$") ? style.getPropertyValue("--" + value.slice(1)).trim() : value;
  if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map((part) => coloured(part, style));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, coloured(part, style)]));
}

function layoutOf(layout, style, element, width) {
  const muted = style.getPropertyValue("--muted").trim(), rule = style.getPropertyValue("--rule").trim();
  const small = NARROW.matches || width !== undefined;
  const axis = { gridcolor: rule, zeroline: false, linecolor: rule, automargin: true, fixedrange: NARROW.matches, title: { standoff: 8 } };
  const full = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 290,
    font: { family: getComputedStyle(document.body).fontFamily, size: small ? 11 : 12, color: muted },
    margin: { l: 48, r: 12, t: 8, b: 40 }, hovermode: "x unified", dragmode: NARROW.matches ? false : "zoom",
    hoverlabel: { bgcolor: style.getPropertyValue("--panel").trim(), bordercolor: rule, font: { color: style.getPropertyValue("--ink").trim() } },
    bargap: 0.25, separators: ".,", ...layout,
  };
  for (const name of Object.keys({ xaxis: 0, yaxis: 0, ...layout })) {
    if (/^[xy]axis/.test(name)) full[name] = { ...axis, ...layout[name], title: { ...axis.title, ...(layout[name] || {}).title } };
  }
  full.showlegend = false; // the keys are in the page
  full.margin = { ...full.margin, ...layout.margin };
  if (element.closest(".chart").classList.contains("wide") && full.hovermode === "x unified" && layout.barmode === "overlay") full.hovermode = "closest";
  full.width = width;
  full.autosize = width === undefined;
  return full;
}

function showKeys(element, traces) {
  const named = traces.filter((trace) => trace.showlegend !== false && trace.name);
  if (named.length < 2) return;
  const keys = made("ul", "keys");
  for (const trace of named) {
    const key = made("li", "", trace.name);
    key.style.setProperty("--key", trace.fillcolor || trace.marker?.color || trace.line?.color);
    keys.append(key);
  }
  const before = element.previousElementSibling;
  if (before.classList.contains("keys")) before.replaceWith(keys);
  else element.before(keys);
}

function draw(element, width) {
  const figure = CHARTS[element.dataset.owner][element.dataset.chart];
  const style = getComputedStyle(document.documentElement);
  const colours = coloured(figure, style);
  const options = { responsive: width === undefined, displayModeBar: false, doubleClick: "reset" };
  showKeys(element, colours.data);
  element.dataset.drawn = "";
  return Plotly.react(element, colours.data, layoutOf(colours.layout, style, element, width), options);
}

const shownPlots = () => [...document.querySelectorAll(".plot")].filter((element) => !element.closest("[hidden]"));
const pause = () => new Promise((resolve) => setTimeout(resolve, 0));

// One chart at a time, those on the screen first, so that the page answers meanwhile.
let drawing = 0;
async function drawVisible() {
  const number = ++drawing;
  const distance = (element) => Math.abs(element.getBoundingClientRect().top);
  for (const element of shownPlots().sort((a, b) => distance(a) - distance(b))) {
    if (number !== drawing) return; // something else has begun to draw
    await draw(element);
    await pause();
  }
  document.documentElement.dataset.drawnIn ??= Math.round(performance.now());
}

function drawForPaper() {
  document.documentElement.classList.add("printing");
  drawing++;
  for (const element of shownPlots()) draw(element, element.closest(".wide") ? PRINTED_WIDTH.wide : PRINTED_WIDTH.half);
}

addEventListener("beforeprint", drawForPaper);
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  drawVisible();
});
DARK.addEventListener("change", drawVisible);
NARROW.addEventListener("change", drawVisible);

// --- runs -----------------------------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll(".tabs button")];
const browsers = [];

function showRun(number) {
  for (const tab of tabs) tab.setAttribute("aria-selected", String(tab.dataset.run === String(number)));
  for (const run of document.querySelectorAll(".run")) run.hidden = run.id !== `run-${number}`;
  drawVisible();
  if (browsers[number]) browsers[number].read();
}
for (const tab of tabs) tab.addEventListener("click", () => showRun(Number(tab.dataset.run)));

// --- samples --------------------------------------------------------------------------------------------------------

const ROW = 48; // pixels, as in the style sheet
const COLOUR_LEGENDS = {
  versions: "by how many optimizer steps the token's version is behind the version at which it was trained",
  ratios: "log-prob now minus when sampled: orange is more likely now, blue less; full colour at 1 nat",
  weights: "behavior weight: orange above 1, blue below; full colour at a factor of e",
  entropies: "entropy of the policy at the token; full colour at 4 nats",
  reward: "advantage of the rollout: green is above its group, red below",
  none: "",
};

async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function made(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

const shown = (value, digits = 2) => (value === null || value === undefined ? "none" : String(Number(value.toFixed(digits))));
const list = (text) => (text === "" ? [] : text.split(",").map((part) => (part === "" ? null : Number(part) / 100)));

class SampleBrowser {
  constructor(section) {
    this.section = section;
    this.find = (name) => section.querySelector("." + name);
    this.chosen = null;
    this.data = null;
  }

  async read() {
    if (this.data || !this.find("list")) return;
    this.data = {}; // being read
    const source = document.getElementById("samples-" + this.section.dataset.owner);
    const began = performance.now();
    const data = await unpacked(source.textContent);
    source.remove();
    this.data = data;
    this.size = data.texts.length;
    this.total = Array.from({ length: this.size }, (_, i) => data.rewards.reduce((sum, column) => sum + (column[i] ?? 0), 0));
    this.listen();
    this.apply();
    this.section.dataset.readIn = Math.round(performance.now() - began);
  }

  listen() {
    const sorts = [
      ["in the order of the run", (i) => i], ["highest reward", (i) => -this.total[i]], ["lowest reward", (i) => this.total[i]],
      ["longest", (i) => -this.data.length[i]], ["shortest", (i) => this.data.length[i]],
      ["most stale", (i) => -this.data.staleness[i]], ["largest log-ratio", (i) => -this.largestRatio(i)],
    ];
    this.sorts = sorts.map(([, key]) => key);
    sorts.forEach(([name], i) => this.find("sort").append(new Option(name, i)));
    let waiting;
    this.find("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => this.apply(), 120); });
    this.find("sort").addEventListener("change", () => this.apply());
    this.find("colour").addEventListener("change", () => this.showDetail());
    const scroller = this.find("list");
    scroller.addEventListener("scroll", () => this.showRows(), { passive: true });
    new ResizeObserver(() => this.showRows()).observe(scroller);
    scroller.addEventListener("keydown", (event) => {
      const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      const at = this.order.indexOf(this.chosen);
      this.choose(this.order[Math.max(0, Math.min(this.order.length - 1, at + moves[event.key]))], true);
    });
  }

  largestRatio(i) {
    if (!this.ratios) this.ratios = this.data.ratios.map((text) => list(text).reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0));
    return this.ratios[i];
  }

  apply() {
    const began = performance.now();
    const { prompts, prompt_text, texts, kept } = this.data;
    const wanted = this.find("search").value.toLowerCase();
    const inPrompt = prompts.map((prompt) => wanted !== "" && prompt.toLowerCase().includes(wanted));
    const found = [];
    for (let i = 0; i < this.size; i++) {
      if (wanted === "" || inPrompt[prompt_text[i]] || texts[i].toLowerCase().includes(wanted)) found.push(i);
    }
    const key = this.sorts[Number(this.find("sort").value)];
    const keys = Float64Array.from({ length: this.size }, (_, i) => key(i));
    found.sort((a, b) => keys[a] - keys[b] || a - b);
    this.order = found;
    this.wanted = wanted;
    const left = kept > this.size ? ` The run kept ${kept.toLocaleString("en")}; the others were left out, to keep the page small.` : "";
    this.find("count").textContent = `${found.length.toLocaleString("en")} of ${this.size.toLocaleString("en")} samples.${left}`;
    this.find("spacer").style.height = `${found.length * ROW}px`;
    this.find("list").scrollTop = 0;
    this.showRows();
    if (found.length && !found.includes(this.chosen)) this.choose(found[0]);
    else this.showDetail();
    this.section.dataset.appliedIn = (performance.now() - began).toFixed(1);
  }

  showRows() {
    if (!this.order) return;
    const scroller = this.find("list"), spacer = this.find("spacer");
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW) - 5);
    const last = Math.min(this.order.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / ROW) + 5);
    const rows = [];
    for (let place = first; place < last; place++) rows.push(this.row(place));
    spacer.replaceChildren(...rows);
  }

  row(place) {
    const i = this.order[place], { data } = this;
    const row = made("div", "row");
    row.style.top = `${place * ROW}px`;
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", String(i === this.chosen));
    const facts = made("div", "facts");
    const reward = made("span", "", "reward ");
    reward.append(made("b", "", shown(this.total[i], 3)));
    facts.append(reward, made("span", "", `step ${data.version[i]}`), made("span", "", `${shown(data.staleness[i], 1)} stale`), made("span", "", `${data.length[i]} tokens`));
    row.append(facts, made("div", "text", data.texts[i].slice(0, 200).replace(/\s+/g, " ").trim() || "(empty)"));
    row.addEventListener("click", () => this.choose(i));
    return row;
  }

  choose(i, scrolls = false) {
    this.chosen = i;
    if (scrolls) {
      const scroller = this.find("list"), top = this.order.indexOf(i) * ROW;
      if (top < scroller.scrollTop) scroller.scrollTop = top;
      else if (top + ROW > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + ROW - scroller.clientHeight;
    }
    this.showRows();
    this.showDetail();
  }

  showDetail() {
    const detail = this.find("detail"), i = this.chosen, { data } = this;
    if (!this.order.length) { detail.replaceChildren(made("p", "note", "No sample holds this text.")); return; }
    const prompt = made("pre", "prompt");
    this.markInto(prompt, data.prompts[data.prompt_text[i]]);
    const facts = made("p", "facts");
    const add = (name, value) => { const fact = made("span", "", `${name} `); fact.append(made("b", "", value)); facts.append(fact); };
    data.reward_names.forEach((name, column) => add(data.reward_names.length > 1 ? name : "reward", shown(data.rewards[column][i], 3)));
    add("advantage", shown(data.advantage[i]));
    add("trained at version", data.version[i]);
    add("mean staleness", shown(data.staleness[i], 1));
    add("tokens", data.length[i]);
    add("ended by", data.finish_reason[i] === "stop" ? "a stop token" : "its length");
    const about = made("p", "about-token", "Point at a token, or tap it, for its numbers.");
    const tokens = made("pre", "completion");
    const legend = this.tokensInto(tokens, i, about);
    detail.replaceChildren(facts, made("h3", "", "Prompt"), prompt, made("h3", "", "Completion"), tokens, legend, about, ...this.siblings(i));
  }

  tokensInto(element, i, about) {
    const { data } = this, mode = this.find("colour").value;
    const cuts = data.cuts[i] === "" ? [] : data.cuts[i].split(",").map(Number);
    const versions = data.versions[i].split(",").flatMap((run) => { const [version, count] = run.split("x").map(Number); return Array(count).fill(version); });
    const values = { ratios: list(data.ratios[i]), weights: list(data.weights[i]), entropies: list(data.entropies[i]) };
    const oldest = Math.max(1, ...versions.filter((version) => version >= 0).map((version) => data.version[i] - version));
    let at = 0;
    cuts.forEach((length, t) => {
      const text = data.texts[i].slice(at, at + length);
      at += length;
      const token = made("span", "token", text);
      const staleness = data.version[i] - versions[t];
      this.colour(token, mode, { staleness, oldest, outside: versions[t] < 0, advantage: data.advantage[i], ratio: values.ratios[t], weight: values.weights[t], entropy: values.entropies[t] });
      const says = versions[t] < 0 ? "not sampled by the policy" :
        `version ${versions[t]} (${staleness} behind), log-ratio ${shown(values.ratios[t])}, weight ${shown(values.weights[t])}, entropy ${shown(values.entropies[t])}`;
      const tell = () => {
        element.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
        token.classList.add("chosen");
        about.textContent = `token ${t + 1}, ${JSON.stringify(text)}: ${says}`;
      };
      token.addEventListener("mouseenter", tell);
      token.addEventListener("click", tell);
      element.append(token);
    });
    if (data.length[i] > cuts.length) element.append(made("span", "note", ` … ${data.length[i] - cuts.length} more tokens were not kept`));
    const legend = made("p", "legend");
    if (mode === "versions") {
      for (const staleness of [...new Set(versions.filter((version) => version >= 0).map((version) => data.version[i] - version))].sort((a, b) => a - b)) {
        const swatch = made("span", "token", staleness === 0 ? "fresh" : `${staleness} behind`);
        this.colour(swatch, mode, { staleness, oldest });
        legend.append(swatch);
      }
    } else legend.textContent = COLOUR_LEGENDS[mode];
    return legend;
  }

  colour(token, mode, facts) {
    if (facts.outside) { token.classList.add("outside"); return; }
    const tint = (name, strength) => { token.style.background = `color-mix(in srgb, var(--${name}) ${Math.round(65 * Math.min(1, strength))}%, transparent)`; };
    const signed = (value, scale) => tint(value > 0 ? "orange" : "blue", Math.abs(value) / scale);
    if (mode === "versions") {
      const shade = facts.staleness === 0 ? 0 : Math.round((6 * facts.staleness) / facts.oldest);
      token.style.background = `var(--stale${shade})`;
      token.style.color = shade >= (DARK.matches ? 4 : 3) ? "var(--on-high)" : "var(--on-low)";
    } else if (mode === "ratios" && facts.ratio) signed(facts.ratio, 1);
    else if (mode === "weights" && facts.weight > 0) signed(Math.log(facts.weight), 1);
    else if (mode === "entropies" && facts.entropy) tint("violet", facts.entropy / 4);
    else if (mode === "reward" && facts.advantage) tint(facts.advantage > 0 ? "green" : "red", 0.25 + Math.abs(facts.advantage) / 3);
  }

  siblings(i) {
    const { data } = this, group = [];
    for (let other = 0; other < this.size; other++) if (data.prompt[other] === data.prompt[i]) group.push(other);
    if (group.length < 2) return [];
    const buttons = made("div", "siblings group");
    for (const other of group) {
      const button = made("button", "", shown(this.total[other], 2));
      button.type = "button";
      button.setAttribute("aria-pressed", String(other === i));
      button.addEventListener("click", () => this.choose(other));
      buttons.append(button);
    }
    return [made("h3", "group", "Rewards of its group"), buttons];
  }

  markInto(element, text) {
    if (!this.wanted) { element.textContent = text; return; }
    const lower = text.toLowerCase();
    let at = 0;
    for (let found = lower.indexOf(this.wanted); found >= 0; found = lower.indexOf(this.wanted, at)) {
      element.append(text.slice(at, found), made("mark", "", text.slice(found, found + this.wanted.length)));
      at = found + this.wanted.length;
    }
    element.append(text.slice(at));
  }
}

for (const section of document.querySelectorAll(".browser")) browsers[Number(section.dataset.owner)] = new SampleBrowser(section);
drawVisible().then(() => browsers[0].read());
