#!/bin/sh
# What the hosts of a cluster know each other by, in ~/.fedcommons (mode 0700, files 0600): a token, and for TLS one
# certificate that is good for these addresses, or for all of a subnet of at most 256.
#   sh cluster/secrets.sh 10.0.0.1 10.0.0.2 ...
#   sh cluster/secrets.sh 10.0.1.0/24
# New ones with each call; start the cluster anew after it.
set -eu
[ $# -gt 0 ] || { echo "usage: sh cluster/secrets.sh ADDRESS|SUBNET ... of the head and the workers" >&2; exit 2; }
names=$(python3 - "$@" << 'END'
import ipaddress, sys
try:
    networks = [ipaddress.ip_network(given) for given in sys.argv[1:]]
    if large := [str(each) for each in networks if each.num_addresses > 256]:
        raise ValueError(f"{large[0]} has more than 256 addresses")
    print(",".join(f"IP:{address}" for each in networks for address in each))
except ValueError as error:
    sys.exit(f"error: secrets.sh takes addresses or subnets of at most 256 addresses: {error}.")
END
)
umask 077
mkdir -p ~/.fedcommons
chmod 700 ~/.fedcommons
cd ~/.fedcommons
rm -f auth_token node.key node.crt # what is there keeps its mode
openssl rand -hex 32 > auth_token
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj "/CN=fedcommons" \
  -addext "subjectAltName=DNS:localhost,IP:127.0.0.1,$names" -keyout node.key -out node.crt 2> /dev/null
echo "$PWD: auth_token, node.key, node.crt for $*"
