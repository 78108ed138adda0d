#!/bin/sh
# What the hosts of a cluster know each other by, in ~/.fedcommons (mode 0700, files 0600): a token, and for TLS one
# certificate that is good for these addresses.
#   sh cluster/secrets.sh 10.0.0.1 10.0.0.2 ...
# New ones with each call; start the cluster anew after it.
set -eu
[ $# -gt 0 ] || { echo "usage: sh cluster/secrets.sh ADDRESS [ADDRESS ...] of the head and the workers" >&2; exit 2; }
umask 077
mkdir -p ~/.fedcommons
cd ~/.fedcommons
openssl rand -hex 32 > auth_token
names="DNS:localhost,IP:127.0.0.1"
for address in "$@"; do names="$names,IP:$address"; done
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj "/CN=fedcommons" \
  -addext "subjectAltName=$names" -keyout node.key -out node.crt 2> /dev/null
echo "$PWD: auth_token, node.key, node.crt for $*"
