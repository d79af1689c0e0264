"""Tables of settings: recipes, cell by cell next to the paper's."""
