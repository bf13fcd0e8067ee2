"""Style and script of the page."""

STYLE = '''
:root{--ink:#1c1e21;--paper:#fff;--dim:#6b7078;--line:#dcdfe3;--panel:#f6f7f9;--good:#1a7f37;--info:#6b7078;--warn:#9a6700;--bad:#c62828}
@media(prefers-color-scheme:dark){:root{--ink:#e6e7e9;--paper:#16181b;--dim:#9aa0a8;--line:#33373d;--panel:#1f2226;
--good:#4cc16b;--info:#9aa0a8;--warn:#e0a92e;--bad:#ff6b60}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:14px/1.45 system-ui,sans-serif}
header,main{max-width:1480px;margin:0 auto;padding:12px 20px}
h1{font-size:22px;margin:8px 0 2px}h2{font-size:17px;border-bottom:1px solid var(--line);padding-bottom:4px;margin:28px 0 10px}
h3{font-size:14px;margin:14px 0 6px}
.state{font-size:16px;font-weight:600;margin:4px 0 10px}.dim{color:var(--dim);font-size:12.5px}
.good{color:var(--good)}.info{color:var(--info)}.warn{color:var(--warn)}.bad{color:var(--bad)}
.facts{display:flex;flex-wrap:wrap;gap:8px;margin:0}.facts div{background:var(--panel);border-radius:6px;padding:5px 10px}
dt{color:var(--dim);font-size:12px}dd{margin:0;font-weight:600;font-variant-numeric:tabular-nums}
nav{display:flex;flex-wrap:wrap;gap:14px;margin-top:8px}a{color:inherit}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr));gap:14px}
figure{margin:0}.chart{background:var(--panel);border-radius:8px;padding:8px 10px;position:relative;min-width:0}
figcaption{font-weight:600;margin-bottom:2px}.chart svg{width:100%;height:auto;display:block}
svg text{font:10.5px system-ui,sans-serif;fill:var(--dim)}
.grid{stroke:var(--line)}.tick{stroke:var(--dim)}.joint{stroke:var(--dim);stroke-dasharray:1 3}
.limit{stroke:var(--good);stroke-dasharray:6 4;opacity:.8}
.curve{fill:none;stroke-width:1.6;stroke-linecap:round;stroke-linejoin:round}.curve.off{display:none}
.pointer{stroke:var(--dim);stroke-dasharray:2 2}
.legend{display:flex;flex-wrap:wrap;gap:2px 4px}.key{border:0;background:none;color:inherit;font:12px system-ui;cursor:pointer;
padding:1px 4px;display:inline-flex;align-items:center;gap:5px}.key i{width:16px;display:inline-block}.key[aria-pressed=false]{opacity:.35}
.tip{position:absolute;pointer-events:none;background:var(--paper);border:1px solid var(--line);border-radius:6px;padding:4px 8px;
font-size:12px;white-space:nowrap;z-index:2;font-variant-numeric:tabular-nums}
table{border-collapse:collapse}td,th{padding:3px 10px;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
.numbers td{text-align:right;font-variant-numeric:tabular-nums}.numbers th{font-weight:500;white-space:nowrap}
.difference td{font-family:ui-monospace,monospace;font-size:12.5px;overflow-wrap:anywhere}.wide{overflow-x:auto}
.mark{border:1px solid currentColor;border-radius:4px;padding:0 6px;font-size:12px;white-space:nowrap}
.picture{margin:0 0 14px}.picture img{max-width:100%;height:auto;border-radius:6px}.picture figcaption{font-weight:400;font-size:12.5px}
pre{background:var(--panel);border-radius:8px;padding:10px;overflow:auto;max-height:70vh;font-size:12.5px}
input[type=search]{width:320px;max-width:100%;padding:5px 8px;margin-bottom:6px;color:inherit;background:var(--panel);
border:1px solid var(--line);border-radius:6px}
'''

# Values under the pointer, curves switched on and off by their key, configuration lines filtered.
SCRIPT = '''
"use strict";
document.querySelectorAll(".chart svg").forEach(function (svg) {
  var figure = svg.parentNode, tip = null, line = null;
  var curves = Array.from(svg.querySelectorAll(".curve")).map(function (path) {
    return {path: path, label: path.dataset.label, colour: path.getAttribute("stroke"), points: JSON.parse(path.dataset.points)};
  });
  function clear() {
    if (tip) { tip.remove(); line.remove(); tip = line = null; }
  }
  svg.addEventListener("pointermove", function (event) {
    var box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    var x = (event.clientX - box.left) * scale, found = [], at = null;
    curves.forEach(function (curve) {
      if (curve.path.classList.contains("off") || !curve.points.length) { return; }
      var best = curve.points.reduce(function (a, b) { return Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a; });
      if (at === null || Math.abs(best[0] - x) < Math.abs(at[0] - x)) { at = best; }
      found.push([curve, best]);
    });
    if (at === null) { clear(); return; }
    if (!tip) {
      tip = document.createElement("div"); tip.className = "tip"; figure.appendChild(tip);
      line = document.createElementNS("http://www.w3.org/2000/svg", "line"); line.setAttribute("class", "pointer"); svg.appendChild(line);
    }
    line.setAttribute("x1", at[0]); line.setAttribute("x2", at[0]); line.setAttribute("y1", 12); line.setAttribute("y2", 206);
    tip.textContent = "";
    var head = document.createElement("div"); head.textContent = at[2]; tip.appendChild(head);
    found.forEach(function (pair) {
      var row = document.createElement("div"), name = document.createElement("span");
      name.textContent = pair[0].label + ": "; name.style.color = pair[0].colour;
      row.appendChild(name); row.appendChild(document.createTextNode(pair[1][3])); tip.appendChild(row);
    });
    var left = event.clientX - figure.getBoundingClientRect().left + 14;
    if (left + tip.offsetWidth > figure.clientWidth) { left = Math.max(0, left - tip.offsetWidth - 28); }
    tip.style.left = left + "px"; tip.style.top = (event.clientY - figure.getBoundingClientRect().top + 12) + "px";
  });
  svg.addEventListener("pointerleave", clear);
  figure.querySelectorAll(".key").forEach(function (key) {
    key.addEventListener("click", function () {
      var path = svg.querySelector('.curve[data-curve="' + key.dataset.curve + '"]');
      var off = path.classList.toggle("off");
      key.setAttribute("aria-pressed", off ? "false" : "true");
    });
  });
});
var filter = document.getElementById("filter");
if (filter) {
  filter.addEventListener("input", function () {
    var word = filter.value.toLowerCase();
    document.querySelectorAll("#config span").forEach(function (line) {
      line.hidden = word !== "" && line.textContent.toLowerCase().indexOf(word) < 0;
    });
  });
}
'''
