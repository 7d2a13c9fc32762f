"""Manifests: the YAML in which a person, or a recording, declares what to build.

May import `targets` and `storage`; not `providers`. Start at `parse`; `schema` says what a file may
hold, `from_config` makes a manifest of a model's config, and `config_yaml` writes it.
"""
