#!/usr/bin/env bash
# Entry point of the Docker image: run a command as the owner of the mounted outputs/.
#
# Usage: scripts/docker_entrypoint.sh COMMAND…
#
# What it writes then belongs to the user who started the container, not to root. With rootless Docker that
# user is the container's root, and nothing changes. OUTPUTS names another folder to look at.

set -euo pipefail
folder=${OUTPUTS:-/workspace/mosim-llms/outputs}
owner=$(stat -c %u:%g "$folder" 2>/dev/null || echo 0:0)
if [ "$(id -u)" -eq 0 ] && [ "${owner%:*}" -ne 0 ]; then
    # This user has no entry in /etc/passwd, which is where PyTorch's compiler and git look for both.
    export HOME=/workspace/home USER=user
    exec setpriv --reuid "${owner%:*}" --regid "${owner#*:}" --clear-groups -- "$@"
fi
exec "$@"
