# What Ray's processes and drivers of a cluster need to know each other, from the files of cluster/secrets.sh. To be read
# by a shell before `ray start` and before a sweep on the cluster:  . cluster/environment.sh
for file in auth_token node.key node.crt; do
  [ -r "$HOME/.fedcommons/$file" ] || {
    echo "error: host $(hostname): $HOME/.fedcommons/$file is missing: copy it from the cluster's other hosts, or create it with cluster/secrets.sh." >&2
    return 2
  }
done
if command -v openssl > /dev/null && ! openssl x509 -in "$HOME/.fedcommons/node.crt" -checkend 0 > /dev/null; then
  echo "error: host $(hostname): $HOME/.fedcommons/node.crt has expired: create new secrets (cluster/secrets.sh) and restart the cluster." >&2
  return 2
fi
[ -n "${VIRTUAL_ENV:-}" ] || PATH="$HOME/fedcommons/.venv/bin:$PATH" # `make cluster` creates it if packages are missing
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.fedcommons/auth_token"
export RAY_USE_TLS=1 RAY_TLS_SERVER_CERT="$HOME/.fedcommons/node.crt"
export RAY_TLS_SERVER_KEY="$HOME/.fedcommons/node.key" RAY_TLS_CA_CERT="$HOME/.fedcommons/node.crt"
export RAY_USAGE_STATS_ENABLED=0 RAY_max_direct_call_object_size=4194304
# With prometheus_client (of ray[default]), Ray would serve metrics on all network interfaces; at port -1, no server starts.
export RAY_enable_metrics_collection=0 AUTOSCALER_METRIC_PORT=-1 DASHBOARD_METRIC_PORT=-1
