// The view of what the time of a run was used for: as a whole, over time and by rank; and what made it slow.
"use strict";

addView({ name: "time", title: "Time" });
addSection("time", { id: "time", show: showTime, content: [h("p", { id: "time-note", class: "soft", role: "status" }), h("div", { id: "time" })] });

const TIME_EVERY_MS = 2000, STACK_HEIGHT = 150, STACK_LEFT = 8, MIN_COLUMN = 2, MAX_COLUMN = 60;
const columnsRead = new Map();  // the place of the column that was read last, by chart

function showTime(runs) {
  for (const run of runs) loadTime(run);
  const known = runs.filter(run => run.time && run.time.goodput !== null);
  byId("time-note").textContent = !runs.length ? "Select a run." : runs.filter(run => !known.includes(run)).map(run =>
    run.time ? `Nothing is known of the time of ${run.name}.` : `Reading the files of ${run.name}.`).join(" ");
  const width = Math.max(240, byId("time").clientWidth - 48);
  fill(byId("time"), [isDark(), width, runs.length, known.map(run => [run.id, run.name, run.time])], () => known.flatMap(run => timeOf(run, runs.length > 1 ? `${run.name}: ` : "", width)));
}
async function loadTime(run) {
  if (MODE !== "live" || run.time?.is_final || Date.now() - (run.timeAskedAt ?? 0) < TIME_EVERY_MS) return;
  run.timeAskedAt = Date.now();
  try { run.time = await get(`api/runs/${run.id}/time`); } catch (error) { showProblem(textOf(error)); }
  show("time");
}

const sumOf = uses => Object.values(uses).reduce((sum, value) => sum + value, 0);
function timeOf(run, prefix, width) {
  const { goodput, words, causes, unseen, periods, ranks, began, length_s: length, period_s: period } = run.time, names = Object.keys(words);
  const used = names.filter(use => run.time.seconds[use]), all = sumOf(run.time.seconds), num = Object.keys(ranks).length;
  const colourOf = use => styleOf(names.indexOf(use)).colour;
  const section = (title, ...content) => h("section", { "aria-label": `${prefix}${title}` }, h("h2", { text: `${prefix}${title}` }), ...content);
  const textOfUses = uses => { const sum = sumOf(uses); return used.filter(use => uses[use] > 0.0005 * sum).map(use => `${words[use]} ${percent(uses[use] / sum, 2)}`).join(", ") || "nothing"; };
  const started = run.facts.started, momentOf = place => Math.max(0, began + (place + 0.5) * period - started);
  let left = 0;
  const bar = svg("svg", { class: "stack", viewBox: `0 0 ${width} 26`, preserveAspectRatio: "none", height: 26, role: "img", "aria-label": `All workers: ${textOfUses(run.time.seconds)}` }, ...used.map(use => {
    const wide = run.time.seconds[use] / all * width, piece = svg("rect", { x: left, y: 0, width: wide, height: 26, fill: colourOf(use) });
    const title = svg("title", {});
    title.textContent = `${words[use]}: ${percent(run.time.seconds[use] / all, 2)}`;
    left += wide;
    piece.append(title);
    return piece;
  }));
  const mark = use => { const box = h("i", {}); box.style.background = colourOf(use); return h("td", { class: "text" }, h("span", { class: "mark" }, box, words[use])); };
  return [
    section("What the time was used for",
      h("p", {}, h("strong", { class: "goodput", text: `goodput ${percent(goodput, 2)}` }), ` of ${seconds(length)} with ${num} worker${num === 1 ? "" : "s"}`), bar,
      table(["use", "part", "of all workers"], used.map(use => [mark(use), cell(percent(run.time.shares[use], 2), "number"), cell(seconds(run.time.seconds[use]), "number")]), `${prefix}Uses of the time`)),
    section("What made it slow", causes.length ? h("ol", { class: "causes" }, ...causes.map(({ cause, share, text, remedy, gain }) => h("li", {},
      h("strong", { text: `${cause}: ${percent(share, 2)}` }), ` ${text} `, h("span", { class: "soft", text: `${remedy[0].toUpperCase()}${remedy.slice(1)}${gain === null ? "" : ` Expected: ${number(gain, 3)} times as fast.`}` }))))
      : h("p", { class: "soft", text: "No cause of slowness was found." }), ...unseen.map(text => h("p", { class: "soft", text: `${text}.` }))),
    periods.length ? section("Over time", stack(`${prefix}Uses over time`, periods, used, colourOf, width, {
      ticks: wide => { const at = ticksOf(0, length, wide / 90, TIME_STEPS), texts = secondTicks(at); return at.map((value, i) => [value / period, texts[i]]); },
      textOf: (uses, place) => `${seconds(place * period)} to ${seconds((place + 1) * period)} after the start, ${number(sumOf(uses) / period, 3)} workers: ${textOfUses(uses)}`,
      help: "The height is the number of workers. A click, or Enter, shows the moment in the timeline.", open: place => showInTimeline(run, momentOf(place)) })) : null,
    section("By rank", stack(`${prefix}Uses by rank`, Object.values(ranks), used, colourOf, width, {
      ticks: (wide, size) => ticksOf(0, Math.max(1, size - 1), wide / 60, WHOLE_STEPS).filter(rankNumber => rankNumber < size).map(rankNumber => [rankNumber + 0.5, String(rankNumber)]),
      textOf: (uses, place) => `rank ${Object.keys(ranks)[place]}, ${seconds(sumOf(uses))}: ${textOfUses(uses)}`,
      help: "The pointer, or left and right, reads one rank after the other." })),
  ].filter(Boolean);
}

// Columns of uses on top of each other, as long as the time that they divide. Keys and pointer read one column after the other.
function stack(label, columns, used, colourOf, width, { ticks, textOf, help, open = null }) {
  const tallest = Math.max(...columns.map(sumOf)) || 1, isWide = columns.length * MIN_COLUMN > width - 2 * STACK_LEFT;
  const columnWidth = isWide ? MIN_COLUMN : Math.min(MAX_COLUMN, (width - 2 * STACK_LEFT) / columns.length);
  if (isWide) width = columns.length * MIN_COLUMN + 2 * STACK_LEFT;
  const tops = columns.map(() => STACK_HEIGHT), paths = used.map(use => {
    const parts = columns.map((uses, place) => {
      const high = (uses[use] ?? 0) / tallest * STACK_HEIGHT;
      if (!high) return "";
      tops[place] -= high;
      return `M${(STACK_LEFT + place * columnWidth).toFixed(2)},${tops[place].toFixed(2)}h${columnWidth.toFixed(2)}v${high.toFixed(2)}h-${columnWidth.toFixed(2)}z`;
    });
    return svg("path", { d: parts.join(""), fill: colourOf(use) });
  });
  const cursor = svg("rect", { class: "cursor", x: 0, y: 0, width: Math.max(2, columnWidth), height: STACK_HEIGHT, visibility: "hidden" });
  const texts = ticks(columnWidth * columns.length, columns.length).map(([at, text], i) => {
    const x = STACK_LEFT + at * columnWidth, element = svg("text", { x, y: STACK_HEIGHT + 15, "text-anchor": x > width - 40 ? "end" : i || at ? "middle" : "start" });
    element.textContent = text;
    return element;
  });
  const picture = svg("svg", { class: "stack", viewBox: `0 0 ${width} ${STACK_HEIGHT + 20}`, preserveAspectRatio: "xMinYMin", height: STACK_HEIGHT + 20, "aria-hidden": "true" }, ...paths, cursor, ...texts);
  if (isWide) picture.style.minWidth = `${width}px`;
  const holder = isWide ? h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${label}, columns` }, picture) : picture;
  const reading = h("p", { class: "small reading", role: "status", text: help });
  let place = -1;
  const read = (next, scrolls = false) => {
    place = Math.min(Math.max(next, 0), columns.length - 1);
    columnsRead.set(label, place);
    cursor.setAttribute("x", STACK_LEFT + place * columnWidth);
    cursor.setAttribute("visibility", "visible");
    if (scrolls && isWide) holder.scrollLeft = STACK_LEFT + place * columnWidth - holder.clientWidth / 2;
    reading.textContent = textOf(columns[place], place);
  };
  if (columnsRead.has(label)) read(columnsRead.get(label));  // what is new has replaced the chart
  const placeOf = event => Math.floor((new DOMPoint(event.clientX, 0).matrixTransform(picture.getScreenCTM().inverse()).x - STACK_LEFT) / columnWidth);
  const steps = { ArrowLeft: () => place - 1, ArrowRight: () => place + 1, Home: () => 0, End: () => columns.length - 1 };
  picture.addEventListener("pointermove", event => read(placeOf(event)));
  if (open) picture.addEventListener("click", event => { read(placeOf(event)); open(place); });
  return h("div", { class: "chart", tabindex: 0, role: "group", "aria-label": `${label}. Left and right read one column after the other. ${help}`, onkeydown: event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (Object.hasOwn(steps, event.key)) read(steps[event.key](), true);
    else if (event.key === "Enter" && open && place >= 0) open(place);
    else return;
    event.preventDefault();
  } }, holder, reading);
}

// Shows a moment of a run, in seconds after its start, in its timeline.
function showInTimeline(run, at) {
  setState({ at: Number(at.toFixed(2)) });
  addEventListener("hashchange", () => { byId("timeline-section").scrollIntoView({ block: "center" }); }, { once: true });
  openView("charts");
}
addEventListener("resize", () => show("time"));
