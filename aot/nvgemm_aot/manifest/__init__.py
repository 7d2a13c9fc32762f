"""Manifests: YAML declarations of GEMMs to build, written by hand or recorded.

May import `targets` and `storage`; not `providers`. Start at `parse`. `schema` defines the keys,
`from_config` makes a manifest from a model's config, and `config_yaml` writes it.
"""
