/* Draws the timelines of the page on a canvas, from the JSON in #page-data (its form: series.py).

   Only spans in view are visited. Spans narrower than MIN_SPAN_PX are summed per pixel column, so each frame is one
   pass over the visible spans. Below the lane of each stage, a thin lane shows the reason why the stage is idle. The
   other charts are SVG and HTML, made in Python. */
"use strict";
(async () => {
  const MIN_SPAN_PX = 3;
  const EDGE_PX = 8, LABEL_PX = 44;
  const LEFT = 62, RIGHT = 14, AXIS_PX = 42;
  const TITLE_PX = 26, LANE_PX = 40, IDLE_PX = 9, ROW_PX = 58;
  const SHADES = 32, FADES = 16;
  const MAX_TEXT = 360;
  const ZOOM = 1.6, STEP = 0.25, WHEEL_PX = 500, TICK_PX = 110;
  const SHORTEST_S = 2e-5;

  const page = JSON.parse(document.getElementById("page-data").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // ---- data

  async function inflate(text) {
    const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  const integers = async (text) => new Int32Array(await inflate(text));

  /* Make spans from their gaps and lengths in ticks. kinds: the meaning of each span. */
  async function readSpans(blocks, tick) {
    const [gaps, lengths, kinds] = await Promise.all(blocks.map(integers));
    const starts = new Float64Array(gaps.length), ends = new Float64Array(gaps.length);
    let ticks = 0;
    for (let i = 0; i < gaps.length; i++) {
      ticks += gaps[i];
      starts[i] = ticks * tick;
      ticks += lengths[i];
      ends[i] = ticks * tick;
    }
    return { starts, ends, kinds };
  }

  async function readStage(stage, tick) {
    const compute = await readSpans([stage.gaps, stage.lengths, stage.issue], tick);
    const idle = await readSpans([stage.idle.gaps, stage.idle.lengths, stage.idle.states], tick);
    return { starts: compute.starts, ends: compute.ends, issue: compute.kinds, idle };
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

  // ---- rows of the timeline: if there are several runs, each has a line of text above its stages

  const rows = [], captions = [];
  let rowsHeight = 4;
  for (const run of runs) {
    if (runs.length > 1) captions.push({ text: run.caption, y: rowsHeight + TITLE_PX - 11 });
    rowsHeight += runs.length > 1 ? TITLE_PX : 6;
    run.top = rowsHeight;
    run.stages.forEach((stage, index) => {
      rows.push({ run, stage, index, y: rowsHeight });
      rowsHeight += ROW_PX;
    });
  }
  const height = rowsHeight + AXIS_PX;

  // ---- colours

  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const blend = (a, b, t) => a.map((value, i) => value + (b[i] - value) * t);
  const css = (rgb) => `rgb(${rgb.map(Math.round).join(",")})`;
  let palette, edges, statePalette;

  function readColors() {
    const [decode, mixed, prefill, idle, text] = ["--decode", "--mixed", "--prefill", "--idle", "--text"]
      .map((name) => channels(color(name)));
    const shade = (share) => (share < 0.5 ? blend(decode, mixed, 2 * share) : blend(mixed, prefill, 2 * share - 1));
    const shades = Array.from({ length: SHADES + 1 }, (_, i) => shade(i / SHADES));
    palette = Array.from({ length: FADES + 1 }, (_, fade) => shades.map((rgb) => css(blend(idle, rgb, fade / FADES))));
    // Unlike the colour of idle time: a line between two spans must not look like idle time.
    edges = shades.map((rgb) => css(blend(rgb, text, 0.4)));
    const panel = channels(color("--panel"));
    statePalette = page.states.map((state) => {
      const rgb = channels(color(`--${state.replace(" ", "-")}`));
      return Array.from({ length: FADES + 1 }, (_, fade) => css(blend(panel, rgb, fade / FADES)));
    });
  }

  // ---- the timeline

  const view = document.getElementById("timeline-view");
  const canvas = document.getElementById("timeline-canvas");
  const tip = document.getElementById("timeline-tip");
  const context = canvas.getContext("2d");
  let range = [0, wholeEnd];
  let due = false;

  const plotWidth = () => Math.max(10, view.clientWidth - LEFT - RIGHT);

  /* Return the position of the first span that ends after t. Spans of a stage are in order and overlap only a little. */
  function firstAfter(ends, t) {
    let low = 0, high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] > t) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /* Each span has the position of its microbatch in the order of issue. Values below NO_ISSUE are LM heads: NO_ISSUE - 1
     is the head of position 0, NO_ISSUE - 2 of position 1. */
  const NO_ISSUE = -1;
  const shareOf = (run, issue) => (issue < 0 ? 0 : run.share[issue]);

  function fillWide(row, x0, x1, issue) {
    const shade = Math.round(shareOf(row.run, issue) * SHADES);
    context.fillStyle = palette[FADES][shade];
    context.fillRect(x0, row.y, x1 - x0, LANE_PX);
    // Lines that suddenly appear at one width would look like a pattern of the run, so they fade in.
    const strength = Math.min(1, (x1 - x0 - EDGE_PX) / (3 * EDGE_PX));
    if (x0 > 0 && strength > 0) {
      context.globalAlpha = strength;
      context.fillStyle = edges[shade];
      context.fillRect(x0, row.y, 1 / devicePixelRatio, LANE_PX);
      context.globalAlpha = 1;
    }
    if (x1 - x0 < LABEL_PX || issue < 0) return;
    const text = row.run.texts[issue];
    context.fillStyle = shade > 0.7 * SHADES ? "#14171b" : "#ffffff";
    context.fillText(text.slice(0, text.indexOf("[")), x0 + 6, row.y + LANE_PX / 2 + 4);
  }

  /* Draw columns in the colour of their busy time and its mean share of prompts. Equal neighbours are one rectangle. */
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
        context.fillRect(from / scale, row.y, (column - from) / scale, LANE_PX);
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
    if (idleTo > idleFrom) context.fillRect(idleFrom, row.y, idleTo - idleFrom, LANE_PX);
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

  /* Draw in each column the idle state with the largest share. Its colour fades with the idle share of the column. */
  function drawIdle(row, [begin, end], width, scale) {
    const { starts, ends, kinds } = row.stage.idle;
    const perSecond = (width * scale) / (end - begin), columns = Math.ceil(width * scale);
    const shares = page.states.map(() => new Float32Array(columns));
    for (let i = firstAfter(ends, begin); i < starts.length && starts[i] < end; i++) {
      const left = Math.max(0, (starts[i] - begin) * perSecond);
      const right = Math.min(columns, (ends[i] - begin) * perSecond);
      for (let column = Math.floor(left); column < right; column++) {
        shares[kinds[i]][column] += Math.min(right, column + 1) - Math.max(left, column);
      }
    }
    const shade = (column) => {
      let most = 0, total = 0;
      for (let state = 0; state < shares.length; state++) {
        total += shares[state][column];
        if (shares[state][column] > shares[most][column]) most = state;
      }
      return total > 0 ? statePalette[most][Math.min(FADES, Math.ceil(total * FADES - 1e-6))] : null;
    };
    let from = 0, last = null;
    for (let column = 0; column <= columns; column++) {
      const next = column < columns ? shade(column) : null;
      if (next === last) continue;
      if (last !== null) {
        context.fillStyle = last;
        context.fillRect(from / scale, row.y + LANE_PX + 1, (column - from) / scale, IDLE_PX);
      }
      from = column;
      last = next;
    }
  }

  function drawSteady(run, [begin, end], width) {
    context.fillStyle = color("--steady");
    for (const [from, to] of run.steady) {
      const x0 = Math.max(0, ((from - begin) / (end - begin)) * width);
      const x1 = Math.min(width, ((to - begin) / (end - begin)) * width);
      if (x1 > x0) context.fillRect(x0, run.top - 4, x1 - x0, 2);
    }
  }

  /* Return round times for an axis, at most one per TICK_PX. */
  function ticks([begin, end], width) {
    const wanted = (end - begin) / Math.max(2, width / TICK_PX);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = power * [1, 2, 5, 10].find((times) => times * power >= wanted);
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let n = Math.ceil(begin / step - 1e-9); n * step <= end * (1 + 1e-12); n++) {
      found.push({ at: n * step, text: (n * step).toFixed(decimals) });
    }
    return found;
  }

  function drawAxis([begin, end], width) {
    context.fillStyle = color("--soft");
    context.textAlign = "center";
    for (const { at, text } of ticks([begin, end], width)) {
      const x = ((at - begin) / (end - begin)) * width;
      context.fillRect(x, rowsHeight, 1, 5);
      context.fillText(text, x, rowsHeight + 17);
    }
    context.fillText("seconds from the first issue", width / 2, rowsHeight + 35);
    context.textAlign = "right";
    for (const row of rows) context.fillText(`stage ${row.index}`, -8, row.y + LANE_PX / 2 + 4);
    context.textAlign = "left";
  }

  function draw() {
    due = false;
    const width = plotWidth(), scale = devicePixelRatio || 1;
    const sides = [(LEFT + width + RIGHT) * scale, height * scale].map(Math.round);
    if (canvas.width !== sides[0] || canvas.height !== sides[1]) {
      [canvas.width, canvas.height] = sides;
      canvas.style.width = `${LEFT + width + RIGHT}px`;
      canvas.style.height = `${height}px`;
    }
    // The origin is the left end of the lanes. Names of stages and captions are in the left margin.
    context.setTransform(scale, 0, 0, scale, LEFT * scale, 0);
    context.clearRect(-LEFT, 0, LEFT + width + RIGHT, height);
    context.font = "11px system-ui, sans-serif";
    for (const row of rows) {
      drawRow(row, range, width, scale);
      drawIdle(row, range, width, scale);
    }
    for (const run of runs) drawSteady(run, range, width);
    drawAxis(range, width);
    context.font = "600 13px system-ui, sans-serif";
    context.fillStyle = color("--text");
    for (const caption of captions) context.fillText(caption.text, -LEFT, caption.y, LEFT + width);
    [view.dataset.begin, view.dataset.end] = range;
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

  function show(wanted) {
    range = within(wanted);
    drawSoon();
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

  // ---- the text about the span under the pointer

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
    return `stage ${row.index}: ${describeState(stage.idle, t)}idle ${seconds(to - from)} in all` +
      `${next ? `\nbefore ${short(next)}` : ""}`;
  }

  function describeState({ starts, ends, kinds }, t) {
    const i = firstAfter(ends, t);
    if (i >= starts.length || starts[i] > t) return "";
    return `${page.states[kinds[i]]} ${seconds(ends[i] - starts[i])}, `;
  }

  function describeSpan({ run, stage, index }, i) {
    const gap = i ? seconds(stage.starts[i] - stage.ends[i - 1]) : "none";
    const issue = stage.issue[i];
    if (issue < NO_ISSUE) {
      return `head of ${short(run.texts[NO_ISSUE - 1 - issue])}\nstage ${index} computes it for the last stage\n` +
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

  /* Show the tip above the lane, so that it hides none of the lanes below. */
  function point(event) {
    const box = view.getBoundingClientRect(), width = plotWidth();
    const x = event.clientX - box.left - LEFT, y = event.clientY - box.top;
    const row = rows.find((candidate) => y >= candidate.y && y < candidate.y + LANE_PX + IDLE_PX + 1);
    const perPixel = (range[1] - range[0]) / width;
    const text = row && x >= 0 && x <= width ? describe(row, range[0] + x * perPixel, perPixel) : null;
    tip.hidden = text === null;
    if (text === null) return;
    if (tip.textContent !== text) tip.textContent = text;
    const room = box.width - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, x + LEFT + 14))}px`;
    tip.style.top = `${row.y - tip.offsetHeight - 4}px`;
  }

  /* Zoom when the wheel turns up or down: the time under the pointer keeps its place. Move when it turns sideways. */
  function turn(event) {
    event.preventDefault();
    const line = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    const perPixel = (range[1] - range[0]) / plotWidth();
    const factor = Math.exp(Math.max(-240, Math.min(240, event.deltaY * line)) / WHEEL_PX);
    const length = Math.min(Math.max((range[1] - range[0]) * factor, SHORTEST_S), LIMITS[1] - LIMITS[0]);
    const x = event.clientX - view.getBoundingClientRect().left - LEFT;
    const fixed = range[0] + x * perPixel;
    const begin = fixed - (length * x) / plotWidth() + event.deltaX * line * perPixel;
    show([begin, begin + length]);
  }

  /* Move the range with one dragging pointer. A vertical touch scrolls the page itself. */
  function drag(event) {
    if (event.button !== 0) return;
    view.setPointerCapture(event.pointerId);
    const from = event.clientX, [begin, end] = range;
    const follow = (moving) => {
      const shift = ((moving.clientX - from) * (end - begin)) / plotWidth();
      if (moving.pointerId === event.pointerId) show([begin - shift, end - shift]);
    };
    const stop = () => {
      view.removeEventListener("pointermove", follow);
      view.removeEventListener("pointerup", stop);
      view.removeEventListener("pointercancel", stop);
    };
    view.addEventListener("pointermove", follow);
    view.addEventListener("pointerup", stop);
    view.addEventListener("pointercancel", stop);
  }

  function press(event) {
    const move = KEYS[event.key];
    if (move === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    show(MOVES[move]());
  }

  function timeline() {
    view.addEventListener("dblclick", () => show(MOVES.all()));
    view.addEventListener("wheel", turn, { passive: false });
    view.addEventListener("pointerdown", drag);
    view.addEventListener("pointerdown", point);
    view.addEventListener("pointermove", point);
    view.addEventListener("pointerleave", () => { tip.hidden = true; });
    view.addEventListener("keydown", press);
    for (const button of document.querySelectorAll("[data-move]")) {
      button.addEventListener("click", () => show(MOVES[button.dataset.move]()));
    }
    new ResizeObserver(drawSoon).observe(view);
    draw();
  }

  // ---- commands to copy

  /* Some browsers give a page from a file no access to the clipboard. Then the text is selected and copied. */
  async function copy(button) {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  }

  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => copy(button));
  }

  readColors();
  timeline();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColors();
    drawSoon();
  });
  document.documentElement.dataset.drawn = "yes";
})();
