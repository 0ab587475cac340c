"""The strict config layer: tables, the rules across them, and reading; it imports no torch."""
