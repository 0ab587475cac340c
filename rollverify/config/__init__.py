"""The strict config layer: tables, the rules across them, and reading; nothing is built here.

It imports no torch, so that a misspelt key is reported before anything large is loaded.
"""
