"""The strict config layer: tables in `schema`, reading in `load`, rules across settings in `check`.

It imports the standard library, tomli, tyro and `rollverify.errors` only, so that a misspelt key is
reported before torch is loaded. It does not build anything from the settings.
"""
