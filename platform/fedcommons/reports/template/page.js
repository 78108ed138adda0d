// Sorts and filters the tables of the page and draws its charts. The element #data holds the data; see contents() in page.py.
const D = JSON.parse(document.getElementById("data").textContent);
const all = (query, root = document) => [...root.querySelectorAll(query)];
const form = document.getElementById("filters"), boxes = form ? all("input", form) : [];
const live = document.body.dataset.state;
const numbersOf = element => element.dataset.runs.trim().split(/\s+/).map(Number);
let shown = new Set(D.runs.keys());

// Stores the reader's choices (filters, theme) for this browser tab, so that they survive a reload of the page.
const choices = {
  get: name => { try { return JSON.parse(sessionStorage.getItem(name + location.pathname)); } catch { return null; } },
  set: (name, value) => { try { sessionStorage.setItem(name + location.pathname, JSON.stringify(value)); } catch { /* the browser allows no storage */ } },
};

// Formats a number as number() in intervals.py does; interval() and bound() are mean_interval() and format_rounds().
function number(value, digits) {
  if (digits !== null) return value.toFixed(digits);
  if (value === 0 || (Math.abs(value) >= 1e-4 && Math.abs(value) < 1e6)) return String(Number(value.toPrecision(3)));
  return value.toExponential(2).replace("e+", "e");
}

const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;

function interval(values, column) {
  if (!values.length) return "-";
  const scaled = values.map(value => value * column.scale), middle = mean(scaled), text = number(middle, column.digits);
  if (scaled.length === 1) return text;
  const sd = Math.sqrt(scaled.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (scaled.length - 1));
  const half = D.quantiles[scaled.length - 2] * sd / Math.sqrt(scaled.length);
  const [least, most] = [Math.min(...scaled) < 0 ? -Infinity : 0, column.scale === 100 ? 100 : Infinity];
  const [low, high] = [Math.max(middle - half, least), Math.min(middle + half, most)].map(end => number(end, column.digits));
  return low === high ? text : `${text} (${low} to ${high})`;
}

function bound(rounds, missed) {
  const text = mean(rounds).toFixed(1).replace(/\.0$/, "");
  return rounds.length === 1 ? `>${text}` : `>${text} (missed by ${missed} of ${rounds.length})`;
}

const place = Object.fromEntries(D.columns.map((column, i) => [column.name, i]));
const rowOf = run => document.getElementById(`run-${run}`);

function valueOf(run, name) {
  const cells = rowOf(run).cells, data = cells[cells.length - D.columns.length + place[name]].querySelector("data");
  return data ? Number(data.value) : null;
}

// Returns the text of a table line's number, computed from some of its finished runs (over_seeds() in tables.py).
function textOf(runs, name) {
  const column = D.columns[place[name]];
  const values = runs.map(run => valueOf(run, name)).filter(value => value !== null), missed = runs.length - values.length;
  if (name !== "rounds_to_target" || !missed) return interval(values, column);
  return bound(runs.map(run => valueOf(run, name) ?? valueOf(run, "rounds")), missed);
}

const finished = run => D.runs[run].s === "finished";

// Writes a number. An interval in brackets after the number may stand in a line of its own, but is not broken.
function put(link, text) {
  const [, head, interval] = /^(.*?) (\(.* to .*)$/.exec(text) ?? [null, text], tail = document.createElement("span");
  tail.textContent = interval;
  link.replaceChildren(head, ...(interval ? [" ", tail] : []));
}

function retell(row) {
  const runs = numbersOf(row), some = runs.filter(run => shown.has(run) && finished(run));
  const whole = runs.every(run => shown.has(run));
  for (const cell of all("td[data-c]", row)) {
    cell.dataset.text ??= cell.textContent;
    if (cell.dataset.text === "-" || !cell.firstElementChild) continue;
    put(cell.firstElementChild, whole ? cell.dataset.text : textOf(some, cell.dataset.c));
    if (some.length) cell.firstElementChild.hash = `run-${some[0]}`;
  }
  const seeds = row.querySelector("td[data-seeds] a");
  if (seeds) {
    seeds.dataset.text ??= seeds.textContent;
    seeds.textContent = whole ? seeds.dataset.text : `${some.length} of ${runs.length}`;
  }
}

// Shows the runs that have a ticked value in each filter; a filter without ticks allows all values.
function filter() {
  const ticked = {};
  for (const box of boxes) if (box.checked) (ticked[box.dataset.dim] ??= new Set()).add(Number(box.value));
  shown = new Set([...D.runs.keys()].filter(i => Object.entries(ticked).every(([dim, values]) => values.has(D.runs[i].f[dim]))));
  let some = false;
  for (const element of all("[data-runs]:is(tr, figure)")) {
    const runs = numbersOf(element);
    element.hidden = !runs.some(run => shown.has(run));
    if (element.dataset.cell) {
      some ||= !element.hidden && runs.some(run => !shown.has(run));
      retell(element);
    }
  }
  for (const body of all("tbody")) {
    const rows = all("tr[data-runs]", body);
    if (rows.length && body.rows[0].className === "title") body.hidden = rows.every(row => row.hidden);
  }
  for (const group of all(".group")) group.hidden = !visible(Number(group.dataset.group)).length;
  for (const note of all(".seeds")) note.hidden = !some;
  if (!form) return;
  for (const menu of all(".filter", form)) {
    const names = all("input:checked", menu).map(box => box.parentElement.textContent.trim());
    menu.querySelector("summary span").textContent = names.length ? names.join(", ") : "all";
  }
  form.querySelector("output").textContent = `${shown.size} of ${D.runs.length} runs`;
  choices.set("ticked", boxes.map(box => box.checked));
  for (const chart of turns.keys()) draw(chart);
}

// Sorts the rows within each group by the column of the button.
function sort(button) {
  const head = button.closest("th"), column = head.cellIndex, table = head.closest("table");
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of all("th[aria-sort]", table)) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => {
    const cell = row.cells[column], data = cell.querySelector("data"), text = data ? data.value : cell.dataset.s ?? cell.textContent.trim();
    return { text, number: text === "" || text === "-" ? NaN : Number(text), none: text === "" || text === "-" };
  };
  for (const body of table.tBodies) {
    const rows = [...body.rows].filter(row => row.className !== "title").map(row => [key(row), row]);
    rows.sort(([a], [b]) => {
      if (a.none || b.none) return a.none - b.none;
      const order = Number.isNaN(a.number) || Number.isNaN(b.number) ? a.text.localeCompare(b.text, "en", { numeric: true }) : a.number - b.number;
      return down ? -order : order;
    });
    body.append(...rows.map(([, row]) => row));
  }
}

// Saves a table as a file: the lines that pandas wrote, for the rows that are shown, in their order on the page.
function save(name, kind, whole) {
  const held = D.files[name], lines = kind === "csv" ? held.csv : held.latex, head = lines.length - held.csv.length + 1;
  const rows = all(`table[data-name="${name}"] tr[data-line]`).filter(row => !row.hidden);
  const text = whole ? lines : [...lines.slice(0, head), ...rows.map(row => lines[head + Number(row.dataset.line)]), ...(kind === "csv" ? [] : held.tail)];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text.join("\n") + "\n"], { type: "text/plain;charset=utf-8" }));
  link.download = `${name}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// The configurations of a group with at least one shown run. Charts draw at most LINES, because more are unreadable.
const LINES = 60;
const visible = group => [...D.cells.keys()].filter(c => D.cells[c].g === group && D.ofCell[c].some(run => shown.has(run)));

// The rows of a chart's data. Finished runs of a configuration are one line: their mean, in the rounds that all of them
// have. Each unfinished run is a thin line.
function courses(cells) {
  const rows = [];
  for (const c of cells) {
    const cell = D.cells[c], runs = D.ofCell[c].filter(run => shown.has(run)), done = runs.filter(finished);
    const lines = runs.filter(run => !finished(run)).map(run => [[run], 1, `${cell.name}, seed ${D.runs[run].seed}, ${D.runs[run].s}`]);
    if (done.length) lines.unshift([done, 2, `${cell.name}, ${done.length} seed${done.length > 1 ? "s" : ""}`]);
    lines.forEach(([of, width, name], i) => rows.push(...line(of).map(row => ({ ...row, width, name, line: `${c}-${i}`, colour: cell.colour, dash: cell.dash }))));
  }
  return rows;
}

// Makes each line wider than the equal lines (to four digits) that are drawn after it, so that all of them are visible.
function widen(rows, x, y) {
  const lines = new Map(), later = new Map();
  for (const row of rows) lines.set(row.line, [...(lines.get(row.line) ?? []), row]);
  for (const line of [...lines.values()].reverse()) {
    const course = line.map(row => `${row[x]} ${row[y]?.toPrecision(4)}`).join(), n = later.get(course) ?? 0;
    for (const row of line) row.width += 3 * n;
    later.set(course, n + 1);
  }
}

function line(runs) {
  const at = new Map();
  for (const run of runs) D.curves[run][0].forEach((round, i) => {
    if (!at.has(round)) at.set(round, { accuracy: [], loss: [], bytes: [], time: [] });
    ["accuracy", "loss", "bytes", "time"].forEach((name, j) => { const value = D.curves[run][j + 1][i]; if (value !== null) at.get(round)[name].push(value); });
  });
  return [...at].sort(([a], [b]) => a - b).map(([round, series]) => {
    const row = { round };
    for (const [name, scale] of [["accuracy", 100], ["loss", 1], ["bytes", 1], ["time", 1]]) {
      const values = series[name].map(value => value * scale), whole = values.length === runs.length;
      row[name] = whole ? mean(values) : null;
      row[`${name}_low`] = whole ? Math.min(...values) : null;
      row[`${name}_high`] = whole ? Math.max(...values) : null;
    }
    return row;
  });
}

function reached(cells) {
  const rows = [];
  for (const c of cells) for (const run of D.ofCell[c].filter(run => shown.has(run) && finished(run))) {
    const rounds = valueOf(run, "rounds_to_target"), missed = rounds === null;
    rows.push({ ...D.cells[c], seed: D.runs[run].seed, missed, rounds: missed ? valueOf(run, "rounds") : rounds, outcome: missed ? "missed" : "reached" });
  }
  return rows;
}

const views = new Map(), turns = new Map();
const dark = () => document.documentElement.dataset.theme === "dark";

function looks() {
  const [ink, line] = dark() ? ["#c9ced4", "#353b42"] : ["#33373c", "#e3e6e9"];
  const axis = { labelColor: ink, titleColor: ink, gridColor: line, domainColor: ink, tickColor: ink, titleFontWeight: "normal" };
  return { background: null, font: "system-ui, sans-serif", view: { stroke: null }, axis, legend: { labelColor: ink, titleColor: ink }, tick: { color: ink } };
}

// Draws a chart again after a change of the shown runs. If two drawings overlap, the result of the later one stays.
async function draw(chart) {
  const kind = chart.dataset.kind, group = Number(chart.closest(".group").dataset.group), name = kind === "target" ? "reached" : "curve";
  const measure = kind === "loss" ? "loss" : "accuracy", across = ["bytes", "time"].includes(kind) ? kind : "round";
  const every = visible(group), few = every.slice(0, LINES);
  const rows = name === "reached" ? reached(few) : courses(few).filter(row => row[measure] !== null && row[across] !== null);
  if (name === "curve") widen(rows, across, measure);
  const turn = (turns.get(chart) ?? 0) + 1, figure = chart.closest("figure");
  turns.set(chart, turn);
  figure.hidden = !rows.length;
  figure.querySelector("figcaption span").textContent = every.length > LINES ? ` (the first ${LINES} of ${every.length}; filter to see others)` : "";
  if (!rows.length) return;
  const spec = structuredClone(D.specs[kind]), cells = few.map(c => D.cells[c]);
  const names = (which, of) => [...new Set(of.map(cell => cell[which]))];
  const colour = names("colour", D.cells).length > 1 ? "colour" : "dash"; // with a single method, colours distinguish sharing strategies
  for (const { encoding } of spec.layer) {
    for (const [channel, which] of [["color", colour], ["fill", colour], ["strokeDash", "dash"]]) {
      if (!encoding[channel]) continue;
      encoding[channel].field = which;
      const domain = names(which, D.cells), colours = domain.map(value => D.looks[which][value]); // equal in all groups
      const range = channel === "strokeDash" ? encoding[channel].scale.range : dark() ? colours.map(colour => colour === "#000000" ? "#ffffff" : colour) : colours;
      encoding[channel].scale = { domain, range };
      if (encoding[channel].legend) encoding[channel].legend = names(which, cells).length > 20 ? null : { ...encoding[channel].legend, values: names(which, cells) };
    }
    if (colour === "dash" || names("dash", cells).length === 1) delete encoding.strokeDash;
  }
  if (name === "reached") spec.height = 26 * new Set(rows.map(row => row.name)).size;
  spec.config = looks();
  spec.datasets = { [name]: rows };
  const place = document.createElement("div");
  place.style.width = "100%";
  chart.append(place);
  const view = await vegaEmbed(place, spec, { ast: true, actions: false, renderer: "svg" });
  if (turns.get(chart) !== turn) { view.finalize(); place.remove(); return; }
  views.get(chart)?.finalize();
  views.set(chart, view);
  for (const other of [...chart.children]) if (other !== place) other.remove();
}

const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting && !turns.has(entry.target)) draw(entry.target);
}, { rootMargin: "300px" });

addEventListener("beforeprint", () => { for (const chart of all(".chart")) if (!turns.has(chart)) draw(chart); });

function theme(name) {
  document.documentElement.dataset.theme = name;
  for (const chart of turns.keys()) draw(chart);
}

function highlight(runs) {
  for (const row of all("tr.hit")) row.classList.remove("hit");
  for (const run of runs) rowOf(run).classList.add("hit");
}

document.addEventListener("click", event => {
  const button = event.target.closest("thead button"), file = event.target.closest("[data-file]"), link = event.target.closest('a[href^="#run-"]');
  if (button) sort(button);
  if (file) save(file.dataset.table, file.dataset.file, "all" in file.dataset);
  if (link) highlight(numbersOf(link.dataset.runs ? link : link.closest("[data-runs]")).filter(run => shown.has(run)));
  for (const menu of all(".filter[open]")) if (!menu.contains(event.target)) menu.open = false;
});
document.addEventListener("keydown", event => { if (event.key === "Escape") for (const menu of all(".filter[open]")) menu.open = false; });
document.addEventListener("mouseover", event => { if (event.target.localName === "data") event.target.title = event.target.value; });
document.getElementById("wide").addEventListener("click", () => document.querySelector('table[data-name="runs"]').classList.toggle("few"));
document.getElementById("theme").addEventListener("click", () => { theme(dark() ? "light" : "dark"); choices.set("theme", dark() ? "dark" : "light"); });
form?.addEventListener("change", filter);
form?.addEventListener("reset", () => setTimeout(filter));
form?.addEventListener("submit", event => event.preventDefault());

const system = matchMedia("(prefers-color-scheme: dark)");
theme(choices.get("theme") ?? (system.matches ? "dark" : "light"));
for (const section of all("main > section")) {
  const link = document.createElement("a");
  link.href = `#${section.id}`;
  link.textContent = section.querySelector("h2").textContent;
  document.querySelector("nav").append(link);
}
for (const link of all("td[data-c] a")) put(link, link.textContent);
(choices.get("ticked") ?? []).forEach((on, i) => { if (boxes[i]) boxes[i].checked = on && Boolean(live); });
if (boxes.some(box => box.checked)) filter();
for (const chart of all(".chart")) watcher.observe(chart);
if (live) setInterval(async () => {
  try {
    const reply = await fetch("state", { cache: "no-store" });
    if (reply.ok && (await reply.text()) !== live) location.reload();
  } catch { /* the server has ended, so the page stays as it is */ }
}, 3000);
