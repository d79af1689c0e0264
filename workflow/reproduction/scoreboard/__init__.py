"""All targets on one page, as Markdown and as HTML."""
