"""Tables of settings: what recipes say, cell by cell beside what a paper prints."""
