"""The colours of every picture: two palettes that people with any kind of colour vision can tell apart, and a scale."""

OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800")
"""Okabe and Ito, Color Universal Design (2008), without black; the yellow darkened, to be seen on white."""
TOL_MUTED = ("#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#cc6677", "#882255", "#aa4499")
"""Paul Tol, Colour Schemes (SRON/EPS/TN/09-002, 2021), muted."""
REST = "#9a9a9a"
SIZES = (
    ("below 1 MiB", 1 << 20, "#fde333"),
    ("1 to 16 MiB", 1 << 24, "#a69d75"),
    ("16 to 128 MiB", 1 << 27, "#66696f"),
    ("128 MiB to 1 GiB", 1 << 30, "#31446b"),
    ("1 GiB and more", 1 << 61, "#00204d"),
)
"""Name, bytes below which a request belongs to it, and colour, of the scale cividis."""
HOLE, FRAME, INK = "#d3d3d3", "#8c8c8c", "#1a1a1a"
