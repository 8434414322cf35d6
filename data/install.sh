#!/bin/sh
# sh data/install.sh PACKAGE..    installs Debian's packages, as root or by sudo, and says so first. Exit code 1 where
# that cannot be done: no apt-get, neither root nor sudo, or it fails.
command -v apt-get >/dev/null || exit 1
sudo=
if [ "$(id -u)" != 0 ]; then
    sudo=sudo
    command -v sudo >/dev/null || exit 1
fi
echo "installing what is missing: $*"
{
    $sudo apt-get update -qq &&
        $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
} >/dev/null
