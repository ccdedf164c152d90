/* Draws the charts of the page from the JSON in #page-data (its form: charts.py) with plotly.js.

   The timeline's axes, drag and touch are plotly's; the spans lie on a canvas below its plot, drawn anew from
   the arrays at every change of the range. Only spans in view are visited. What is narrower than MIN_SPAN_PX is
   summed up by pixel column, so that a frame costs a pass over the visible spans, however many they are. */
"use strict";
(async () => {
  const MIN_SPAN_PX = 3;
  const EDGE_PX = 8, LABEL_PX = 44;
  const MARGIN = { l: 62, r: 14, t: 4, b: 42 };
  const TITLE_PX = 26, ROW_PX = 26, ROW_GAP_PX = 4;
  const SHADES = 32, FADES = 16;
  const MAX_TEXT = 360;
  const ZOOM = 1.6, STEP = 0.25, WHEEL_PX = 500;
  const SHORTEST_S = 2e-5;
  const CONFIG = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };

  const page = JSON.parse(document.getElementById("page-data").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const runColor = (i) => color(`--run-${i % 6}`);
  const runDash = (i) => ["solid", "dash", "dot"][Math.floor(i / 6) % 3];

  // ---- data

  async function inflate(text) {
    const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  const integers = async (text) => new Int32Array(await inflate(text));

  async function readStage(stage, tick) {
    const [gaps, lengths, issue] = await Promise.all([stage.gaps, stage.lengths, stage.issue].map(integers));
    const starts = new Float64Array(gaps.length), ends = new Float64Array(gaps.length);
    let ticks = 0;
    for (let i = 0; i < gaps.length; i++) {
      ticks += gaps[i];
      starts[i] = ticks * tick;
      ticks += lengths[i];
      ends[i] = ticks * tick;
    }
    return { starts, ends, issue };
  }

  async function readRun(run) {
    const stages = await Promise.all(run.stages.map((stage) => readStage(stage, run.tick_s)));
    const prefill = await integers(run.prefill_tokens), decodes = await integers(run.decodes);
    const texts = new TextDecoder().decode(await inflate(run.texts)).split("\n");
    const share = Float32Array.from(prefill, (tokens, i) => tokens / Math.max(1, tokens + decodes[i]));
    return { ...run, stages, prefill, decodes, texts, share };
  }

  const runs = await Promise.all(page.runs.map(readRun));
  const lastEnd = (stage) => (stage.ends.length ? stage.ends[stage.ends.length - 1] : 0);
  const wholeEnd = Math.max(1e-3, ...runs.flatMap((run) => [run.wall_s, ...run.stages.map(lastEnd)]));
  const LIMITS = [-0.01 * wholeEnd, 1.01 * wholeEnd];

  // ---- rows of the timeline: for several runs each has a line of text above its stages

  const rows = [], captions = [];
  let rowsHeight = 0;
  for (const run of runs) {
    if (runs.length > 1) captions.push({ text: run.caption, y: rowsHeight + TITLE_PX - 9 });
    rowsHeight += runs.length > 1 ? TITLE_PX : 6;
    run.top = rowsHeight;
    run.stages.forEach((stage, index) => {
      rows.push({ run, stage, index, y: rowsHeight });
      rowsHeight += ROW_PX + ROW_GAP_PX;
    });
    rowsHeight += 4;
  }

  // ---- colours

  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const blend = (a, b, t) => a.map((value, i) => value + (b[i] - value) * t);
  const css = (rgb) => `rgb(${rgb.map(Math.round).join(",")})`;
  let palette, edges;

  function readColors() {
    const [decode, mixed, prefill, idle, text] = ["--decode", "--mixed", "--prefill", "--idle", "--text"]
      .map((name) => channels(color(name)));
    const shade = (share) => (share < 0.5 ? blend(decode, mixed, 2 * share) : blend(mixed, prefill, 2 * share - 1));
    const shades = Array.from({ length: SHADES + 1 }, (_, i) => shade(i / SHADES));
    palette = Array.from({ length: FADES + 1 }, (_, fade) => shades.map((rgb) => css(blend(idle, rgb, fade / FADES))));
    // Away from the colour of idle time, for which a line between two spans must not be taken.
    edges = shades.map((rgb) => css(blend(rgb, text, 0.4)));
  }

  // ---- the timeline

  const view = document.getElementById("timeline-view");
  const plot = document.getElementById("timeline-plot");
  const canvas = document.getElementById("timeline-canvas");
  const tip = document.getElementById("timeline-tip");
  const context = canvas.getContext("2d");
  let range = [0, wholeEnd];
  let due = false;

  const plotWidth = () => Math.max(10, plot.clientWidth - MARGIN.l - MARGIN.r);

  /* Position of the first span that ends after t; spans of a stage are in order and do not overlap by much. */
  function firstAfter(ends, t) {
    let low = 0, high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] > t) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /* What a span is of: the place of its microbatch among those issued; below NO_ISSUE the head of one, counted down. */
  const NO_ISSUE = -1;
  const shareOf = (run, issue) => (issue < 0 ? 0 : run.share[issue]);

  function fillWide(row, x0, x1, issue) {
    const shade = Math.round(shareOf(row.run, issue) * SHADES);
    context.fillStyle = palette[FADES][shade];
    context.fillRect(x0, row.y, x1 - x0, ROW_PX);
    // Lines that came and went at one width would look like a pattern of the run.
    const strength = Math.min(1, (x1 - x0 - EDGE_PX) / (3 * EDGE_PX));
    if (x0 > 0 && strength > 0) {
      context.globalAlpha = strength;
      context.fillStyle = edges[shade];
      context.fillRect(x0, row.y, 1 / devicePixelRatio, ROW_PX);
      context.globalAlpha = 1;
    }
    if (x1 - x0 < LABEL_PX || issue < 0) return;
    const text = row.run.texts[issue];
    context.fillStyle = shade > 0.7 * SHADES ? "#14171b" : "#ffffff";
    context.fillText(text.slice(0, text.indexOf("[")), x0 + 6, row.y + ROW_PX / 2 + 4);
  }

  /* Columns of busy time and of busy time weighted by share become colours; equal neighbours are one rectangle. */
  function fillColumns(row, busy, mixed, scale) {
    let from = 0, last = null;
    for (let column = 0; column <= busy.length; column++) {
      let next = null;
      if (column < busy.length && busy[column] > 0) {
        const fade = Math.min(FADES, Math.ceil(busy[column] * FADES - 1e-6));
        next = palette[fade][Math.round((mixed[column] / busy[column]) * SHADES)];
      }
      if (next === last) continue;
      if (last !== null) {
        context.fillStyle = last;
        context.fillRect(from / scale, row.y, (column - from) / scale, ROW_PX);
      }
      from = column;
      last = next;
    }
  }

  function drawRow(row, [begin, end], width, scale) {
    const { starts, ends, issue } = row.stage;
    const perSecond = width / (end - begin);
    const at = (t) => (t - begin) * perSecond;
    const idleFrom = Math.max(0, at(0)), idleTo = Math.min(width, at(row.run.wall_s));
    context.fillStyle = palette[0][0];
    if (idleTo > idleFrom) context.fillRect(idleFrom, row.y, idleTo - idleFrom, ROW_PX);
    const columns = Math.ceil(width * scale);
    const busy = new Float32Array(columns), mixed = new Float32Array(columns);
    const wide = [];
    for (let i = firstAfter(ends, begin); i < starts.length && starts[i] < end; i++) {
      const x0 = at(starts[i]), x1 = at(ends[i]);
      if (x1 - x0 >= MIN_SPAN_PX) {
        wide.push(i);
        continue;
      }
      const share = shareOf(row.run, issue[i]);
      const left = Math.max(0, x0 * scale), right = Math.min(columns, x1 * scale);
      for (let column = Math.floor(left); column < right; column++) {
        const covered = Math.min(right, column + 1) - Math.max(left, column);
        busy[column] += covered;
        mixed[column] += covered * share;
      }
    }
    fillColumns(row, busy, mixed, scale);
    for (const i of wide) fillWide(row, Math.max(0, at(starts[i])), Math.min(width, at(ends[i])), issue[i]);
  }

  function drawSteady(run, [begin, end], width) {
    context.fillStyle = color("--steady");
    for (const [from, to] of run.steady) {
      const x0 = Math.max(0, ((from - begin) / (end - begin)) * width);
      const x1 = Math.min(width, ((to - begin) / (end - begin)) * width);
      if (x1 > x0) context.fillRect(x0, run.top - 4, x1 - x0, 2);
    }
  }

  function draw() {
    due = false;
    const width = plotWidth(), scale = devicePixelRatio || 1;
    const sides = [(width + MARGIN.l) * scale, rowsHeight * scale].map(Math.round);
    if (canvas.width !== sides[0] || canvas.height !== sides[1]) {
      [canvas.width, canvas.height] = sides;
      canvas.style.top = `${MARGIN.t}px`;
      canvas.style.width = `${width + MARGIN.l}px`;
      canvas.style.height = `${rowsHeight}px`;
    }
    // The origin is the plot's; only the captions reach into its left margin.
    context.setTransform(scale, 0, 0, scale, MARGIN.l * scale, 0);
    context.clearRect(-MARGIN.l, 0, width + MARGIN.l, rowsHeight);
    context.font = "11px system-ui, sans-serif";
    for (const row of rows) drawRow(row, range, width, scale);
    for (const run of runs) drawSteady(run, range, width);
    context.font = "600 13px system-ui, sans-serif";
    context.fillStyle = color("--text");
    for (const caption of captions) context.fillText(caption.text, -MARGIN.l, caption.y, width + MARGIN.l);
  }

  function drawSoon() {
    if (due) return;
    due = true;
    requestAnimationFrame(draw);
  }

  function within([begin, end]) {
    const length = Math.min(Math.max(end - begin, SHORTEST_S), LIMITS[1] - LIMITS[0]);
    const from = Math.min(Math.max(begin, LIMITS[0]), LIMITS[1] - length);
    return [from, from + length];
  }

  /* The spans follow in the next frame, the axis as soon as plotly is done with it: a wheel turns faster than that. */
  let settling = false;

  async function show(wanted) {
    range = within(wanted);
    drawSoon();
    if (settling) return;
    settling = true;
    while (range.some((edge, i) => edge !== plot.layout.xaxis.range[i])) {
      await new Promise(requestAnimationFrame);
      await Plotly.relayout(plot, { "xaxis.range": [...range] });
    }
    settling = false;
  }

  const zoomed = (factor) => {
    const middle = (range[0] + range[1]) / 2, half = (range[1] - range[0]) / 2 / factor;
    return [middle - half, middle + half];
  };
  const moved = (steps) => range.map((t) => t + steps * STEP * (range[1] - range[0]));
  const MOVES = {
    in: () => zoomed(ZOOM),
    out: () => zoomed(1 / ZOOM),
    left: () => moved(-1),
    right: () => moved(1),
    all: () => [0, wholeEnd],
  };
  const KEYS = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all", Home: "all" };

  function axisStyle() {
    return { gridcolor: color("--line"), linecolor: color("--line"), zerolinecolor: color("--line"),
      tickfont: { color: color("--soft"), size: 11 } };
  }

  function baseLayout() {
    return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: color("--text"), size: 12 },
      showlegend: false, hoverlabel: { bgcolor: color("--page"), font: { color: color("--text") } } };
  }

  function timelineLayout() {
    return {
      ...baseLayout(), margin: MARGIN, height: rowsHeight + MARGIN.t + MARGIN.b, dragmode: "pan", hovermode: false,
      xaxis: { ...axisStyle(), range, minallowed: LIMITS[0], maxallowed: LIMITS[1], showgrid: false, zeroline: false,
        ticks: "outside", tickcolor: color("--line"), nticks: Math.max(3, Math.round(plotWidth() / 110)),
        title: { text: "seconds from the first issue", font: { size: 12, color: color("--soft") }, standoff: 6 } },
      yaxis: { ...axisStyle(), range: [rowsHeight, 0], fixedrange: true, showgrid: false, zeroline: false, showline: false,
        ticks: "outside", ticklen: 4, tickcolor: "rgba(0,0,0,0)",
        tickvals: rows.map((row) => row.y + ROW_PX / 2), ticktext: rows.map((row) => `stage ${row.index}`) },
    };
  }

  // ---- what is under the pointer

  const seconds = (value) => {
    const size = Math.abs(value);
    if (size >= 1) return `${value.toFixed(3)} s`;
    return size >= 1e-3 ? `${(value * 1e3).toFixed(2)} ms` : `${(value * 1e6).toFixed(0)} \u00b5s`;
  };
  const short = (text) => (text.length > MAX_TEXT ? `${text.slice(0, MAX_TEXT)} ...` : text);

  function describe(row, t, perPixel) {
    const { run, stage } = row;
    const i = firstAfter(stage.ends, t);
    if (i < stage.starts.length && stage.starts[i] <= t) {
      return stage.ends[i] - stage.starts[i] < perPixel ? describeMany(row, t, perPixel) : describeSpan(row, i);
    }
    if (t < 0 || t > run.wall_s) return null;
    const from = i ? stage.ends[i - 1] : 0, to = i < stage.starts.length ? stage.starts[i] : run.wall_s;
    if (to - from < perPixel) return describeMany(row, t, perPixel);
    const next = i < stage.starts.length && stage.issue[i] >= 0 ? run.texts[stage.issue[i]] : "";
    return `stage ${row.index}: idle ${seconds(to - from)}${next ? `\nbefore ${short(next)}` : ""}`;
  }

  function describeSpan({ run, stage, index }, i) {
    const gap = i ? seconds(stage.starts[i] - stage.ends[i - 1]) : "none";
    const issue = stage.issue[i];
    if (issue < NO_ISSUE) {
      return `head of ${short(run.texts[NO_ISSUE - 1 - issue])}\nstage ${index}, in the place of the last one\n` +
        `start ${seconds(stage.starts[i])}, duration ${seconds(stage.ends[i] - stage.starts[i])}, gap before ${gap}`;
    }
    const known = issue < 0 ? "microbatch without an issue in the trace" : short(run.texts[issue]);
    const prefill = issue < 0 ? 0 : run.prefill[issue], decodes = issue < 0 ? 0 : run.decodes[issue];
    return `${known}\nstage ${index}: ${prefill + decodes} tokens, ${prefill} of prompts, ${decodes} decodes\n` +
      `start ${seconds(stage.starts[i])}, duration ${seconds(stage.ends[i] - stage.starts[i])}, gap before ${gap}`;
  }

  function describeMany({ run, stage, index }, t, perPixel) {
    const begin = t - perPixel / 2, end = t + perPixel / 2;
    let count = 0, busy = 0, prefill = 0, decodes = 0;
    for (let i = firstAfter(stage.ends, begin); i < stage.starts.length && stage.starts[i] < end; i++) {
      count += stage.issue[i] >= NO_ISSUE;
      busy += Math.min(end, stage.ends[i]) - Math.max(begin, stage.starts[i]);
      if (stage.issue[i] >= 0) {
        prefill += run.prefill[stage.issue[i]];
        decodes += run.decodes[stage.issue[i]];
      }
    }
    return `stage ${index}, ${seconds(end - begin)} at ${seconds(t)}: ${count} microbatches, ` +
      `${Math.round((100 * busy) / perPixel)} % busy\n${prefill} tokens of prompts, ${decodes} decodes; zoom in for more`;
  }

  function point(event) {
    const box = plot.getBoundingClientRect(), width = plotWidth();
    const x = event.clientX - box.left - MARGIN.l, y = event.clientY - box.top - MARGIN.t;
    const row = rows.find((candidate) => y >= candidate.y && y < candidate.y + ROW_PX);
    const perPixel = (range[1] - range[0]) / width;
    const text = row && x >= 0 && x <= width ? describe(row, range[0] + x * perPixel, perPixel) : null;
    tip.hidden = text === null;
    if (text === null) return;
    if (tip.textContent !== text) tip.textContent = text;
    const room = box.width - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, x + MARGIN.l + 14))}px`;
    tip.style.top = `${y + MARGIN.t + 22}px`;
  }

  /* Up and down zooms about the instant under the pointer, which stays where it is; sideways moves. */
  function turn(event) {
    event.preventDefault();
    const line = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    const perPixel = (range[1] - range[0]) / plotWidth();
    const factor = Math.exp(Math.max(-240, Math.min(240, event.deltaY * line)) / WHEEL_PX);
    const length = Math.min(Math.max((range[1] - range[0]) * factor, SHORTEST_S), LIMITS[1] - LIMITS[0]);
    const x = event.clientX - plot.getBoundingClientRect().left - MARGIN.l;
    const fixed = range[0] + x * perPixel;
    const begin = fixed - (length * x) / plotWidth() + event.deltaX * line * perPixel;
    show([begin, begin + length]);
  }

  async function timeline() {
    const anchor = { x: [0, wholeEnd], y: [0, rowsHeight], mode: "markers", marker: { opacity: 0 }, hoverinfo: "skip" };
    await Plotly.newPlot(plot, [anchor], timelineLayout(), CONFIG);
    const follow = () => {
      if (!settling) range = plot.layout.xaxis.range.map(Number);
      drawSoon();
    };
    plot.on("plotly_relayouting", follow);
    plot.on("plotly_afterplot", follow);
    // Plotly's is two taps within 0.3 s; how far apart clicks of a mouse may be the browser knows.
    plot.on("plotly_doubleclick", () => show(MOVES.all()));
    view.addEventListener("mousedown", (event) => { if (event.detail === 2) show(MOVES.all()); }, { capture: true });
    view.addEventListener("wheel", turn, { passive: false });
    view.addEventListener("pointermove", point);
    view.addEventListener("pointerdown", point);
    view.addEventListener("pointerleave", () => { tip.hidden = true; });
    view.addEventListener("keydown", (event) => {
      const move = KEYS[event.key];
      if (move === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      show(MOVES[move]());
    });
    for (const button of document.querySelectorAll("[data-move]")) {
      button.addEventListener("click", () => show(MOVES[button.dataset.move]()));
    }
    draw();
  }

  // ---- causes

  function causeTraces(explained) {
    return page.causes.map((key) => ({
      type: "bar", orientation: "h", y: explained.map((_, i) => i), x: explained.map((run) => run.causes[key]),
      marker: { color: color(`--${key}`), line: { width: 1, color: color("--panel") } },
      hovertemplate: `${key.slice(0, -2).replaceAll("_", " ")}: %{x:.3f} s<extra></extra>`,
    }));
  }

  function causes() {
    const element = document.getElementById("causes-plot");
    if (element === null) return null;
    const explained = runs.filter((run) => run.causes);
    const layout = {
      ...baseLayout(), barmode: "relative", bargap: 0.3, height: 70 + 42 * explained.length, dragmode: false,
      margin: { l: explained.length > 1 ? 110 : 8, r: 14, t: 4, b: 42 },
      xaxis: { ...axisStyle(), fixedrange: true, ticksuffix: " s", zeroline: true },
      yaxis: { ...axisStyle(), fixedrange: true, autorange: "reversed", showgrid: false,
        tickvals: explained.map((_, i) => i),
        ticktext: explained.map((run) => (explained.length > 1 ? plain(shortened(run.title, 16)) : "")) },
    };
    return Plotly.react(element, causeTraces(explained), layout, CONFIG);
  }

  const shortened = (text, room) => (text.length > room ? `${text.slice(0, room - 1)}\u2026` : text);
  /* Plotly reads a little HTML in its texts. */
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

  // ---- distributions

  const tint = (hex, alpha) => `rgba(${channels(hex).join(",")},${alpha})`;

  function lines(series, shape) {
    return series.map(({ x, y }, i) => ({
      x, y, mode: "lines", line: { color: runColor(i), dash: runDash(i), width: 2, shape },
      fill: runs.length === 1 ? "tozeroy" : "none", fillcolor: tint(runColor(i), 0.3),
    }));
  }

  function marks(key) {
    const shapes = [];
    runs.forEach((run, i) => {
      for (const [name, dash] of [["p50", "dash"], ["p99", "dot"]]) {
        const at = run.marks[key]?.[name];
        if (at == null) continue;
        shapes.push({ type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper",
          line: { color: runs.length > 1 ? runColor(i) : color("--text"), dash, width: 1.2 } });
      }
    });
    return shapes;
  }

  const STEPS = [[1], [1, 3], [1, 2, 5], [1, 2, 3, 5, 7], [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8]];
  const roundSeconds = (value) => (value >= 0.999 ? `${+value.toPrecision(2)} s`
    : value >= 0.999e-3 ? `${+(value * 1e3).toPrecision(2)} ms` : `${+(value * 1e6).toPrecision(2)} \u00b5s`);

  /* Round figures with their unit for a logarithmic axis of seconds: the roundest that make three of them. */
  function ticks(bins) {
    const low = Math.min(...bins), high = Math.max(...bins);
    const decades = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) decades.push(10 ** power);
    const choices = STEPS.map((steps) => decades.flatMap((decade) => steps.map((step) => step * decade))
      .filter((value) => value >= low && value <= high));
    const tickvals = choices.find((values) => values.length >= 3) ?? choices.at(-1);
    return { tickvals, ticktext: tickvals.map(roundSeconds), ticksuffix: "", tickangle: 0 };
  }

  function chart(element, series, { shape, log, unit, label, key, format }) {
    const layout = {
      ...baseLayout(), height: 190, margin: { l: 44, r: 10, t: 8, b: 30 }, dragmode: false, shapes: marks(key),
      hovermode: "x",
      xaxis: { ...axisStyle(), fixedrange: true, type: log ? "log" : "linear", ticksuffix: unit, nticks: 6,
        zeroline: false, ...(log ? ticks(series.flatMap(({ x }) => x)) : {}) },
      yaxis: { ...axisStyle(), fixedrange: true, tickformat: ".0%", rangemode: "tozero", nticks: 5 },
    };
    const template = `%{y:.1%} ${label} %{x:${format}}${unit}<extra></extra>`;
    const traces = lines(series, shape).map((trace) => ({ ...trace, hovertemplate: template }));
    return Plotly.react(element, traces, layout, CONFIG);
  }

  function histogram(element, key) {
    const { log, edges: bins, shares } = page.distributions[key];
    const series = shares.map((share) => (share.length ? { x: bins, y: [...share, share[share.length - 1]] } : { x: [], y: [] }));
    const unit = key.endsWith("_s") ? "s" : "";
    return chart(element, series, { shape: "hv", log, unit, label: "from", key, format: log ? ".3s" : ".0f" });
  }

  function cumulative(element, key) {
    const series = runs.map(({ request_bubble: { seconds: x, shares: y } }) => ({ x, y }));
    return chart(element, series, { shape: "hv", log: false, unit: "s", label: "of requests up to", key, format: ".3f" });
  }

  function charts() {
    const drawn = [...document.querySelectorAll("[data-chart]")].map((element) => {
      const key = element.dataset.chart;
      return key in page.distributions ? histogram(element, key) : cumulative(element, key);
    });
    for (const swatch of document.querySelectorAll("[data-run]")) swatch.style.background = runColor(swatch.dataset.run);
    return Promise.all([causes(), ...drawn]);
  }

  readColors();
  await timeline();
  await charts();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColors();
    Plotly.relayout(plot, timelineLayout());
    charts();
  });
  document.documentElement.dataset.drawn = "yes";
})();
