"""The site: these pages as HTML, made by `make site`."""

project = "attnlm"
copyright = "the attnlm developers"
extensions = ["myst_parser"]
exclude_patterns = ["scale", "_build"]
html_theme = "furo"
html_title = "attnlm"
html_show_copyright = False
html_show_sphinx = False
myst_heading_anchors = 3
