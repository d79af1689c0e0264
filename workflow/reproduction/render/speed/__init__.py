"""Pages, claims and figures of the speed tables, from records and the papers' numbers; nothing here measures."""
