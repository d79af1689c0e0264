"""Tables as data: configuration, schemas, expansion for a slot."""
