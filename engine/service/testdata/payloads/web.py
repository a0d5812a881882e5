"""Python's http.server, counting its requests; and a file that it writes as it goes."""
import http.server, threading, urllib.request
from lib import serve

n = 0
log = open("/tmp/http.log", "w")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global n
        n += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"%d" % n)

    def log_message(self, format, *args):
        log.write(format % args + "\n")
        log.flush()


server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()


def step():
    got = int(urllib.request.urlopen("http://127.0.0.1:8000/", timeout=10).read())
    lines = open("/tmp/http.log").read().count("GET")
    assert lines == got, (lines, got)
    return got


serve(step)
