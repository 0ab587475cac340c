"""A worker process without mathematics: does what the request's "answer" says."""

import json
import os
import signal
import sys
import time


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        match request["answer"]:
            case "hang":
                time.sleep(600)
            case "die":
                os._exit(1)
            case "noise":
                sys.stdout.write("no JSON\n")
            case "late reply of another":
                sys.stdout.write(json.dumps({"id": 10**9, "verdict": "right"}) + "\n")
        reply = {"id": request["id"], "verdict": request["answer"], "pid": os.getpid()}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


main()
