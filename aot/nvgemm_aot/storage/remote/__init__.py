"""Remote cache: entries that many machines share, behind each one's own build cache.

`remote_cache` is what other rooms use. A store (`redis_store`, `s3_store`, `shared_directory`)
moves bytes and is not trusted: an entry counts by its signature (`store_trust`), and its reader
checks the payload as if a compiler had just written it. Libraries of stores are imported when one
is opened.
"""
