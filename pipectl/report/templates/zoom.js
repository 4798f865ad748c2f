for (const zoom of document.querySelectorAll(".zoom")) {
  const picture = zoom.querySelector("svg"), bars = picture.querySelector(".bars");
  const about = document.getElementById("about"), hint = about.textContent;
  const width = bars.width.baseVal.value, labels = bars.querySelectorAll(".label");
  const values = [...bars.querySelectorAll("rect, line, text")].flatMap(part =>
    ["x", "x1", "x2", "width"].filter(name => part.hasAttribute(name))
      .map(name => [part, name, Number(part.getAttribute(name))]));
  const pixel = () => picture.viewBox.baseVal.width / picture.getBoundingClientRect().width;
  let from = 0, scale = 1;
  function draw() {
    from = Math.min(Math.max(from, 0), width - width / scale);
    for (const [part, name, value] of values)
      part.setAttribute(name, (name === "width" ? value : value - from) * scale);
    for (const label of labels) {
      const room = label.parentNode.querySelector("rect").width.baseVal.value;
      label.classList.toggle("hidden", room < 8 * label.textContent.length + 2);
    }
  }
  zoom.addEventListener("wheel", event => {
    event.preventDefault();
    const left = (event.clientX - picture.getBoundingClientRect().left) * pixel();
    const x = Math.min(Math.max(left - bars.x.baseVal.value, 0), width), at = from + x / scale;
    scale = Math.min(Math.max(scale * (event.deltaY < 0 ? 1.25 : 0.8), 1), 1e5);
    from = at - x / scale;
    draw();
  }, { passive: false });
  zoom.addEventListener("pointermove", event => {
    if (event.buttons) {
      from -= event.movementX * pixel() / scale;
      draw();
    }
    about.textContent = event.target.closest("g")?.querySelector("title").textContent ?? hint;
  });
  zoom.addEventListener("dblclick", () => { scale = 1; draw(); });
}
