"""What several test files share: small models, copies of the project, invariants."""
