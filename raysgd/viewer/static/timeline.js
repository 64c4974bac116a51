// The timeline of a run: its workers, attempts, checkpoints and events.
"use strict";

const MAX_LANES = 64;

function showTimeline(runs) {
  const width = byId("timeline").clientWidth;
  fill(byId("timeline"), runs.map(run => [run.id, run.name, run.style, width, run.isOver || run.updated, run.factsVersion, state.at]), () => runs.map(timelineOf));
  return runs.length > 0;
}
function timelineOf(run) {
  const { workers, attempts, checkpoints, events, num_checkpoints: count } = run.facts.timeline;
  const start = run.facts.started || (workers[0] && workers[0].start) || 0, end = Math.max(run.updated, start + 0.001);
  const ranks = [...new Set(workers.map(life => life.rank))].sort((a, b) => a - b), lanes = ranks.slice(0, MAX_LANES);
  const width = Math.max(280, byId("timeline").clientWidth), left = 78, laneHeight = 18, labelHeight = 13;
  const at = time => left + (Math.min(Math.max(time, start), end) - start) / (end - start) * (width - left - 8);
  const marks = marksOfEvents(events, at, width), top = 10 + labelHeight * Math.max(1, marks.numRows);
  const height = top + (lanes.length + 1) * laneHeight + 24;
  const picture = svg("svg", { class: "timeline", viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": `Timeline of ${run.name}: ${workers.length} worker processes, ${attempts.length} attempts, ${count} checkpoints` });
  const title = text => { const element = svg("title", {}); element.textContent = text; return element; };
  const label = (x, y, text, anchor) => { const element = svg("text", { x, y, "text-anchor": anchor || "start" }); element.textContent = text; return element; };
  lanes.forEach((rankNumber, lane) => {
    const y = top + lane * laneHeight;
    picture.append(label(2, y + 13, `rank ${rankNumber}`), svg("line", { class: "lane", x1: left, x2: width - 8, y1: y + 17, y2: y + 17 }));
  });
  for (const life of workers) {
    const lane = lanes.indexOf(life.rank);
    if (lane < 0) continue;
    const y = top + lane * laneHeight + 3, from = at(life.start), to = Math.max(from + 2, at(life.end ?? end));
    const how = { died: "died", left: "left the group", end: "until the end of the run", "": "still there" }[life.how];
    const entered = life.inside.length ? seconds(life.inside[0][0] - start) : "–";
    const text = `rank ${life.rank}, pid ${life.pid} on ${life.node}: ready after ${seconds(life.start - start)}, `
      + `train_func entered after ${entered}, ${how}${life.end ? ` after ${seconds(life.end - start)}` : ""}${MODE === "live" ? ". A click shows what it printed then." : ""}`;
    const group = svg("g", {}, title(text), svg("rect", { class: "starting", x: from, y, width: to - from, height: 11 }));
    for (const [entry, exit] of life.inside) {
      const begin = Math.max(from, at(entry)), stop = Math.min(to, at(exit ?? life.end ?? end));
      group.append(svg("rect", { fill: run.style.colour, x: begin, y, width: Math.max(1, stop - begin), height: 11 }));
    }
    if (MODE === "live") group.addEventListener("click", event => {
      const box = picture.getBoundingClientRect();
      showOutputAt(run, life.rank, Math.max(0, ((event.clientX - box.left) / box.width * width - left) / (width - left - 8) * (end - start)));
    });
    picture.append(group);
    if (life.how === "died") picture.append(svg("path", { class: "died", d: `M${to - 4},${y + 1}l8,9m0,-9l-8,9` }));
  }
  const y = top + lanes.length * laneHeight + 3;
  picture.append(label(2, y + 10, "checkpoints"));
  let last = -Infinity;
  for (const saved of checkpoints) {
    const to = at(saved.committed), from = saved.seconds === null ? to : at(saved.committed - saved.seconds);
    if (to - last < 1.5) continue;
    last = to;
    picture.append(svg("rect", { class: "saved", x: Math.min(from, to - 2), y, width: Math.max(2, to - from), height: 11 }));
    picture.lastChild.append(title(savedText(saved, start)));
  }
  for (const mark of marks.all) {
    const colour = `var(--${mark.kind})`, row = mark.row === undefined ? marks.numRows - 1 : mark.row;
    const line = svg("line", { class: "event", x1: mark.x, x2: mark.x, y1: 4 + labelHeight * row, y2: y + 12 });
    line.style.stroke = colour;
    const group = svg("g", {}, title(`${mark.label} after ${seconds(mark.event.time - start)}: ${mark.event.text}`), line);
    if (mark.row !== undefined) {
      group.append(label(mark.textX, 12 + labelHeight * row, mark.label));
      group.lastChild.style.fill = colour;
    }
    picture.append(group);
  }
  if (state.at >= 0) {  // the moment that another view has chosen
    const x = at(start + state.at);
    picture.append(svg("g", {}, title(`${seconds(state.at)} after the start`), svg("line", { class: "moment", x1: x, x2: x, y1: 0, y2: height - 18 })));
  }
  const ticks = ticksOf(0, end - start, (width - left) / 90, TIME_STEPS);
  secondTicks(ticks).forEach((text, i) => picture.append(label(at(start + ticks[i]), height - 6, text, ticks[i] > 0.97 * (end - start) ? "end" : i ? "middle" : "start")));
  const runs = selected();
  const box = (text, style) => { const mark = h("i", {}); Object.assign(mark.style, style); return h("span", {}, mark, text); };
  return h("div", {}, runs.length > 1 ? h("h3", { text: run.name }) : null, picture,
    h("div", { class: "key" }, box("starts or waits", { background: "var(--line)" }), box("in train_func", { background: run.style.colour }),
      box("checkpoint is written", { background: "var(--good)" }), h("span", {}, h("strong", { class: "bad", text: "×" }), " worker died"),
      ...Object.keys(marks.labels).map(kind => h("span", {}, svg("svg", { width: 14, height: 12, class: "timeline-line", "aria-hidden": "true" },
        svg("line", { class: "event", x1: 7, x2: 7, y1: 0, y2: 12, stroke: `var(--${kind})` })), ` ${[...marks.labels[kind]].join(", ")}`)),
      lanes.length < ranks.length ? h("span", { text: `${ranks.length - lanes.length} more ranks are not drawn` }) : null),
    h("details", { "data-key": `${run.id} attempts` }, h("summary", { text: `${attempts.length} attempt${attempts.length === 1 ? "" : "s"}` }),
      table(["attempt", "workers", "began after", "until train_func", "lasted", "from checkpoint", "ended by"], attempts.slice(-200).map(attempt => [
        cell(String(attempt.number), "number"), cell(String(attempt.world_size), "number"), cell(seconds(attempt.start - start), "number"),
        cell(attempt.entered ? seconds(Math.max(0, attempt.entered - attempt.start)) : "–", "number"),
        cell(seconds((attempt.end ?? end) - attempt.start), "number"), cell(attempt.checkpoint || "–"), cell(attempt.why || "–")]), `Attempts of ${run.name}`)),
    h("details", { "data-key": `${run.id} checkpoints` }, h("summary", { text: checkpointSummary(checkpoints, count) }),
      table(["number", "iteration", "committed after", "took", "size", "kept", "metrics"], checkpoints.slice(-200).reverse().map(saved => [
        cell(String(saved.number), "number"), cell(String(saved.iteration), "number"), cell(seconds(saved.committed - start), "number"),
        cell(seconds(saved.seconds), "number"), cell(bytes(saved.num_bytes), "number"), cell(saved.is_deleted ? "deleted" : "kept", ""), cell(saved.metrics)]), `Checkpoints of ${run.name}`)));
}
// The lines of events, and which of them have a text. A text hides no other: each is in a row where there is room for it. One
// that has the same beside it has none.
function marksOfEvents(events, at, width) {
  const all = [], labels = {}, ends = [], lastOf = {};
  for (const event of events) {
    if (!Object.hasOwn(KINDS, event.kind)) continue;
    const label = (event.label || event.kind).replaceAll("_", " "), kind = KINDS[Object.hasOwn(KINDS, event.label || "") ? event.label : event.kind], x = at(event.time);
    (labels[kind] ??= new Set()).add(label);
    const before = all[all.length - 1], length = 7 + 6.2 * label.length, mark = { event, kind, label, x };
    if (x <= (lastOf[label] ?? -Infinity)) {
      if (x - before.x < 1.5 && kind !== "bad") continue;
    } else {
      mark.textX = Math.max(0, Math.min(x + 2, width - length));
      mark.row = ends.findIndex(end => end <= mark.textX);
      if (mark.row < 0) mark.row = ends.length;
      ends[mark.row] = lastOf[label] = mark.textX + length;
    }
    all.push(mark);
  }
  return { all, labels, numRows: ends.length };
}
const savedText = (saved, start) => `checkpoint ${saved.number} of iteration ${saved.iteration}: committed after `
  + `${seconds(saved.committed - start)}, took ${seconds(saved.seconds)}, ${bytes(saved.num_bytes)}`;
function checkpointSummary(checkpoints, count) {
  const times = checkpoints.map(saved => saved.seconds).filter(value => value !== null).sort((a, b) => a - b);
  const middle = times.length ? `, half of them in ${seconds(times[Math.floor(times.length / 2)])} or less, the longest in ${seconds(times[times.length - 1])}` : "";
  return `${count} checkpoint${count === 1 ? "" : "s"}${middle}`;
}

let widthBefore = innerWidth;
addEventListener("resize", () => { if (innerWidth !== widthBefore) { widthBefore = innerWidth; show("timeline"); } });
