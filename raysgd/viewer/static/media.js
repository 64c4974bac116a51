// Images, texts and histograms that were reported, by iteration. raysgd/_util/media.py has their form.
"use strict";

const IMAGE = /^image:media\/([0-9a-f]{32}\.png)$/, HISTOGRAM = /^histogram:([^:,]+),([^:,]+):([0-9,]+)$/;
const shownAt = new Map(), images = new Map();  // the iteration that a metric is shown at; data URLs by run and name

function partsOf(text) {  // a metric may be a list of images or texts
  if (!text.startsWith("[")) return [text];
  try {
    const list = JSON.parse(text);
    return list.length && list.every(each => typeof each === "string") ? list : [text];
  } catch { return [text]; }
}
function showMedia(runs) {
  const names = byRank([...new Set(runs.flatMap(run => [...run.texts].filter(([, found]) => found.length).map(([name]) => name)))]);
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean), matching = names.filter(name => words.every(word => name.toLowerCase().includes(word)));
  fill(byId("media"), [runs.map(run => [run.id, run.name, run.version, run.style]), matching], () => matching.map(name => mediaOf(runs, name)));
  return matching.length > 0;
}
function mediaOf(runs, name) {
  const all = [...new Set(runs.flatMap(run => (run.texts.get(name) || []).map(([iteration]) => iteration)))].sort((a, b) => a - b);
  const body = h("div", { class: "media-row" }), label = h("span", { class: "soft small" });
  const slider = h("input", { type: "range", id: `at-${name}`, min: 0, max: all.length - 1, step: 1, "aria-label": `Iteration of ${name}`, oninput: () => {
    slider.value === slider.max ? shownAt.delete(name) : shownAt.set(name, all[slider.value]);
    draw();
  } });
  const wanted = shownAt.get(name), place = wanted === undefined ? all.length - 1 : Math.max(0, all.findLastIndex(iteration => iteration <= wanted));
  slider.value = place;
  slider.hidden = all.length < 2;
  const draw = () => {
    const iteration = all[slider.value];
    label.textContent = `iteration ${iteration}${all.length > 1 ? ` (${Number(slider.value) + 1} of ${all.length})` : ""}`;
    slider.setAttribute("aria-valuetext", `iteration ${iteration}`);
    body.replaceChildren(...runs.flatMap(run => {
      const entry = (run.texts.get(name) || []).findLast(([at]) => at <= iteration);
      return entry ? [h("figure", {}, ...(runs.length > 1 || entry[0] !== iteration ? [h("figcaption", { class: "soft small", text: [runs.length > 1 ? run.name : "", entry[0] !== iteration ? `iteration ${entry[0]}` : ""].filter(Boolean).join(", ") })] : []),
        h("div", { class: "media-parts" }, ...partsOf(entry[1]).map(text => partOf(run, name, text))))] : [];
    }));
  };
  draw();
  return h("div", { class: "media" }, h("div", { class: "head" }, h("h3", { text: name }), slider, label), body);
}
function partOf(run, name, text) {
  const image = IMAGE.exec(text), histogram = HISTOGRAM.exec(text);
  if (image) return imageOf(run, name, image[1]);
  if (histogram) return histogramOf(run, name, Number(histogram[1]), Number(histogram[2]), histogram[3].split(",").map(Number));
  return h("pre", { tabindex: 0, role: "group", "aria-label": name, text });
}
function imageOf(run, name, file) {
  const key = `${run.id} ${file}`, element = h("img", { alt: `${name} of ${run.name}`, src: images.get(key) || null });
  if (!images.has(key)) loadImage(run, file).then(address => { images.set(key, address); element.src = address; },
    error => element.replaceWith(h("p", { class: "soft small", text: `The image is missing: ${textOf(error)}` })));
  return element;
}
async function loadImage(run, file) {
  if (MODE === "file") {
    const found = byId(`image-${run.id}-${file}`);
    if (!found) throw new Error("the file has no room for it.");
    return `data:image/png;base64,${found.textContent}`;
  }
  const answer = await fetch(`api/runs/${run.id}/media/${file}`, { headers: { "X-Raysgd-Token": TOKEN } });
  if (!answer.ok) throw new Error(await answer.text());
  const data = await answer.blob();
  return new Promise((resolve, reject) => { const reader = new FileReader(); reader.onload = () => resolve(reader.result); reader.onerror = reject; reader.readAsDataURL(data); });
}
function histogramOf(run, name, low, high, counts) {
  const width = 300, height = 120, most = Math.max(1, ...counts), step = width / counts.length, total = counts.reduce((sum, count) => sum + count, 0);
  const picture = svg("svg", { class: "histogram", viewBox: `0 0 ${width} ${height + 18}`, width, height: height + 18, role: "img",
    "aria-label": `Histogram ${name} of ${run.name}: ${total} values from ${number(low)} to ${number(high)}` });
  counts.forEach((count, i) => {
    const size = count / most * height, bar = svg("rect", { x: i * step, width: Math.max(0.5, step - 0.5), y: height - size, height: size },
      svgTitle(`${number(low + (high - low) * i / counts.length)} to ${number(low + (high - low) * (i + 1) / counts.length)}: ${count}`));
    bar.style.fill = run.style.colour;
    picture.append(bar);
  });
  picture.append(svgText(number(low, 4), 0, height + 14, "start"), svgText(`${total} values`, width / 2, height + 14), svgText(number(high, 4), width, height + 14, "end"));
  return picture;
}
