"""``python wheels/release --output DIR``: builds and checks all wheels of a release."""

from release_command import main

if __name__ == "__main__":
    main()
