/* The links and ids of a page, and what is wrong: pictures that are missing, messages of the build, and what the width of
   the window hides: content right of the page, a table, equation or picture that goes on behind an edge without a mark,
   and the second half of a number, option or code that a line break divides in a table. */
() => {
  const all = [...document.querySelectorAll('article *')], range = document.createRange(), cut = [];
  const boxes = all.filter(e => e.scrollWidth > e.clientWidth && /auto|scroll/.test(getComputedStyle(e).overflowX));
  const box = e => boxes.findLast(b => b.contains(e)), isSeen = e => e.matches('img') || e.textContent.trim();
  const breaks = e => new Set([...e.getClientRects()].filter(r => r.width).map(r => Math.round(r.bottom))).size > 1;
  for (const e of [document.documentElement, document.querySelector('.content') ?? document.body])
    if (e.scrollWidth > e.clientWidth) cut.push(`${e.tagName} is ${e.scrollWidth - e.clientWidth} pixels too wide`);
  for (const e of all.filter(e => e.getBoundingClientRect().right > innerWidth + 1))
    if (isSeen(e) && !box(e)) cut.push(`cut: ${e.outerHTML}`);
  for (const of of boxes.filter(b => !b.matches('pre'))) {
    const style = getComputedStyle(of);
    if (!style.backgroundImage.includes('gradient') && !parseFloat(style.borderRight))
      cut.push(`no edge: ${of.outerHTML}`);
  }
  for (const cell of document.querySelectorAll('article :is(td, th)')) {
    for (const code of cell.querySelectorAll('code')) if (breaks(code)) cut.push(`broken: ${code.innerText}`);
    for (let texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), text; text = texts.nextNode();)
      for (const number of text.data.matchAll(/[-−+<>≤≥]*\d[\d.,]*( ?%)?( [±→] [-−+<>≤≥]?\d[\d.,]*)?/g)) {
        range.setStart(text, number.index), range.setEnd(text, number.index + number[0].length);
        if (breaks(range)) cut.push(`broken: ${number[0]}`);
      }
  }
  return {
    links: [...document.querySelectorAll('a[href]')].map(a => a.href),
    ids: [...document.querySelectorAll('[id]')].map(one => one.id),
    wrong: [...[...document.images].filter(i => !i.naturalWidth).map(i => i.src), ...cut.map(one => one.slice(0, 200)),
            ...document.querySelectorAll('.system-message, .problematic, merror')].map(String),
  };
}
