"""Cache moves, decode attention and sampling: torch references and their fast forms."""
