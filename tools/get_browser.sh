#!/bin/sh
# Find a Chromium for the tests of the page of runs, or install Debian's as root. Without it those tests are skipped.
set -eu
find_browser() {
    for name in chromium chromium-browser google-chrome; do
        command -v "$name" && return 0
    done
    return 1
}

if ! find_browser >/dev/null; then
    command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || {
        echo "browser: there is no Chromium on the PATH; install it, as by: apt-get install chromium" >&2
        exit 1
    }
    echo "browser: install Debian's chromium (some hundred MB)"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core; } >/dev/null
fi
echo "browser: $(find_browser)"
