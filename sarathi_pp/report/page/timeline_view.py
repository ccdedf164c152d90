"""The timeline on a page: the frame that page.js draws into, and the text that explains it."""

from __future__ import annotations

from sarathi_pp.report.vocabulary import STATES, name_of

_IDLE = "".join(
    f'<span><i class="state {name_of(key).replace(" ", "-")}"></i>{name_of(key)}</span>'
    for key in STATES
    if key != "compute_s"
)

TIMELINE = f"""<div class="tools" role="toolbar" aria-label="Time shown">
<button type="button" data-move="in" aria-label="zoom in">+</button>
<button type="button" data-move="out" aria-label="zoom out">&minus;</button>
<button type="button" data-move="left" aria-label="earlier">&larr;</button>
<button type="button" data-move="right" aria-label="later">&rarr;</button>
<button type="button" data-move="all">whole run</button>
<p class="legend"><span>decodes only</span><i class="ramp"></i><span>prefill only</span>
<span><i class="steady"></i>steady window</span></p>
<p class="legend">below each stage, the reason why it is idle: {_IDLE}</p>
</div>
<div id="timeline-view" tabindex="0" role="application"
 aria-label="Microbatches of each stage over time. Arrow keys move, plus and minus zoom, 0 shows the whole run.">
<canvas id="timeline-canvas" aria-hidden="true"></canvas><div id="timeline-tip" role="status" hidden></div></div>
<p class="hint"><code>m7[s3:256+128 | d s1:300]</code> is microbatch 7. It has 128 prompt tokens of sequence 3 from
position 256, and a decode of sequence 1 that reads 300 tokens. <code>s3/1</code> is the second choice of its
line. <code>head</code> is the LM head of a microbatch that the first stage computes for the last one.</p>
<p class="hint">Turn the wheel to zoom, and drag to move. Or use the keys: arrows, +, - and 0. If several microbatches
share a pixel, it has their mixed colour, which is paler the longer the stage is idle.</p>"""
