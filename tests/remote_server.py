#!/usr/bin/env python3
"""A server for tests of data sets at URLs. Prints its port, and serves a folder until its standard input closes. With a
certificate, also serves the folder over TLS, and prints that port after the first.

  tests/remote_server.py FOLDER [CERTIFICATE KEY]

/web/NAME            the file, with ranges
/norange/NAME        the whole file, even if a range is requested
/faulty/NAME         the file; every tenth answer is delayed, truncated, reset, or 503
/busy/NAME           503
/breaking/NAME       the file; each connection breaks after 1,000,000 bytes of the body
/retry-CODE-X/NAME   the file; CODE with Retry-After: X for the first request with this path; "date": a date in 30 s
/gate/NAME           the file; while the folder has a file "gate": no answer, or 503 if its content is "busy"
/refused             the number of answers 503 of /gate/
/wholegate/NAME      the same, without ranges
/changing/NAME       the file, with another ETag in each answer
/slow/NAME           the file, after 50 ms
/requests/N          the number of requests for files in /slow/, and the most that ran at the same time during the last N
/dated/NAME          the file, without an ETag; /dated/NAME?f=OTHER the file OTHER
/redated/NAME        the file, without an ETag, with another Last-Modified in each answer
/weak/NAME           the file, with the weak ETag W/"1"
/bare/NAME           the file, with neither an ETag nor a Last-Modified
/turning/NAME        3 million bytes without a version, which are a or b, in turns
/mixed-KIND/NAME     3 million bytes, which are b in ranges that do not begin at 0, and a otherwise; MIXED has the versions
/range/NAME?RANGE    one byte, with RANGE as Content-Range
/headers/N?LINES     one byte, with LINES more headers of N bytes each
/drip/NAME           600 bytes, 10 per second
/once/NAME           the file; 503 for the first request with this path
/later/NAME          the file; the whole file if a range that does not begin at 0 is requested
/refusing/NAME       the file; 416 if a range is requested
/unnamed/NAME        the file; 206 without Content-Range
/echo                the headers of the request; /away a redirection to /echo of the host localhost
/short/NAME          fewer bytes than Content-Length says
/endless/NAME        a body that does not end
/list/...            an HTML page instead of a list
/secure/NAME         a redirection to https; /plainly/NAME a redirection to http; /loop a redirection to itself
/error-CODE/...      S3: an error
/list-KIND/...       S3: a faulty list (faulty_list())
/BUCKET/...          S3: lists of three objects per page, and objects, for requests with a correct signature
/account/box/...     Azure: lists of three objects per page, and objects, for requests whose query has sig=se+cret/
"""
import email.utils
import hashlib
import hmac
import http.server
import itertools
import os
import socket
import socketserver
import ssl
import struct
import sys
import threading
import time
import urllib.parse
from xml.sax import saxutils

KEY, SECRET, TOKEN, REGION = "AKIDTEST", "s/ecret+", "session/token=", "eu-test-1"
PAGE = 3
FAULTS = itertools.cycle(["503", "cut", "reset", "delay"])
COUNT = itertools.count(1)
SLOW_S = 0.05
STALL_S = 100
MIXED = {  # ETag and Last-Modified of the first and of other ranges; without them, other ranges are redirected to /mixed-bare/
    "steady": (('W/"x"', 1e9), ('W/"x"', 1e9)),
    "weak": (('W/"x"', 1e9), ('W/"x"', 2e9)),
    "untagged": (('"x"', 1e9), ("", 1e9)),
    "undated": (("", 1e9), ("", None)),
    "undated_weak": (('W/"x"', 1e9), ('W/"x"', None)),
    "bare": (("", None), ("", None)),
    "moved": (('"x"', None), None),
}
ERRORS = {  # status, message, further elements and headers
    "PermanentRedirect": (301, "Use the endpoint.", "<Endpoint>x</Endpoint>", {"x_amz_bucket_region": "eu-far-1"}),
    "AuthorizationHeaderMalformed": (400, "The region is wrong.", "<Region>eu-far-1</Region>", {}),
    "AccessDenied": (403, "Access Denied\nRequestId: 1", "", {"x_amz_bucket_region": REGION}),
    "NoSuchBucket": (404, "No\x7fbucket", "", {}),
}
seen = set()  # paths of requests
slow = []  # per request for a file in /slow/: number of such requests in progress when it arrived
running = refused = 0
LOCK = threading.Lock()


def digest(key, text):
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def signature(headers, path, query):
    """Returns whether a request has the signature that AWS's documentation specifies for its headers, path and query."""
    fields = dict(part.strip().split("=", 1) for part in headers["Authorization"].split(" ", 1)[1].split(","))
    names = fields["SignedHeaders"].split(";")
    if not {"host", "x-amz-date", "x-amz-content-sha256"} <= set(names) or names != sorted(names):
        return None
    pairs = sorted(urllib.parse.parse_qsl(query, keep_blank_values=True))
    canonical = "\n".join([
        "GET", urllib.parse.quote(urllib.parse.unquote(path), safe="/-_.~"),
        "&".join(urllib.parse.quote(name, safe="-_.~") + "=" + urllib.parse.quote(value, safe="-_.~")
                 for name, value in pairs),
        *[name + ":" + (headers[name] or "").strip() for name in names], "", ";".join(names),
        headers["x-amz-content-sha256"]])
    date = headers["x-amz-date"]
    google = fields["Credential"].startswith("GOOGTEST/")  # an HMAC key: another secret, any region and no token
    scope = "/".join([date[:8], "auto" if google else REGION, "s3", "aws4_request"])
    if fields["Credential"] != ("GOOGTEST" if google else KEY) + "/" + scope:
        return None
    if headers["x-amz-security-token"] != (None if google else TOKEN):
        return None
    text = "\n".join(["AWS4-HMAC-SHA256", date, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = ("AWS4" + (SECRET[::-1] if google else SECRET)).encode()
    for part in scope.split("/"):
        key = digest(key, part)
    return fields["Signature"] == digest(key, text).hex()


def faulty_list(kind, token):
    """Returns a page of a list. Its objects are those of /web/plain, with wrong sizes."""
    entries = ["<Contents><Key>plain/counter-%06d.tar</Key><Size>1</Size><ETag>&quot;a&quot;</ETag></Contents>" % i
               for i in range(4)]
    following = "<NextContinuationToken>%s</NextContinuationToken>"
    body = {
        "overlapping": entries[1] + entries[2] if token else entries[0] + entries[1] + following % "a",
        "descending": entries[1] + entries[0],
        "repeated": entries[0] + entries[0],
        "constant": following % "a",
        "turning": following % ("b" if token == "a" else "a"),
        "nested": "<Part>" + entries[0] + "</Part>" + entries[1],
        "empty": following % (int(token) + 1 if token.isdigit() else 1),
        "version1": "<IsTruncated>true</IsTruncated>" + entries[0],
        "other": entries[0].replace("plain/", "planet/"),
        "encoded": "<EncodingType>url</EncodingType>" + entries[0],
        "error": "</ListBucketResult><Error>",
        "doctype": "",
        "cut": entries[0],
        "open": entries[0].replace("</Contents>", ""),
    }[kind]
    text = "<ListBucketResult>" + body + "</ListBucketResult>"
    if kind == "error":
        text = "<Error><Code>InternalError</Code><Message>We failed.</Message></Error>"
    if kind == "doctype":
        text = "<!DOCTYPE a [<!ENTITY b \"c\">]>" + text
    return text.encode()[:-12 if kind == "cut" else None]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def give(self, name, ranges=True, tag=None, cut=False, modified=None, partial=True, data=None, most=None):
        path = os.path.join(sys.argv[1], name)
        if not data and not os.path.isfile(path):
            return self.answer(404)
        if not data:
            with open(path, "rb") as stream:
                data = stream.read()
        if tag is None:
            tag = '"%s"' % hashlib.md5(data).hexdigest()
        if tag and self.headers["If-Match"] not in (None, tag):
            return self.answer(412)
        version = {"ETag": tag} if tag else {}
        if modified:
            version["Last_Modified"] = email.utils.formatdate(modified, usegmt=True)
        asked = self.headers["Range"]
        if not asked or not ranges:
            return self.answer(200, data, **version)
        first, last = asked.split("=")[1].split("-")
        first, last = int(first), min(int(last), len(data) - 1)
        if first > last:
            return self.answer(416)
        body = data[first:last + 1]
        headers = {"Content_Length": str(len(body)), **version}
        if partial:
            headers["Content_Range"] = "bytes %d-%d/%d" % (first, last, len(data))
        self.answer(206, body[:len(body) // 2] if cut and len(body) > 1 else body[:most], **headers)
        self.close_connection |= cut or most is not None

    def mixed(self, kind, name):
        later = not (self.headers["Range"] or "bytes=0-").startswith("bytes=0-")
        if not MIXED[kind][later]:
            return self.answer(302, Location="/mixed-bare/" + name)
        tag, modified = MIXED[kind][later]
        return self.give(name, tag=tag, modified=modified, data=b"ab"[later:later + 1] * 3000000)

    def drip(self):
        self.answer(206, Content_Range="bytes 0-599/600", Content_Length="600")
        for _ in range(600 // 10):
            self.wfile.write(b"x" * 10)
            time.sleep(1)

    def fault(self, name):
        with LOCK:
            number = next(COUNT)
            kind = next(FAULTS) if number % 10 == 0 else None
        if kind == "503":
            return self.answer(503)
        if kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return self.connection.close()
        if kind == "delay":
            time.sleep(0.2)
        return self.give(name, cut=kind == "cut")

    def retry(self, code, after, name):
        if not self.is_first():
            return self.give(name)
        return self.answer(int(code), Retry_After=after if after != "date" else email.utils.formatdate(time.time() + 30, usegmt=True))

    def gate(self, name, ranges):
        global refused
        path = os.path.join(sys.argv[1], "gate")
        try:
            with open(path, encoding="ascii") as stream:
                busy = stream.read() == "busy"
        except FileNotFoundError:
            return self.give(name, ranges=ranges)
        if busy:
            with LOCK:
                refused += 1
            return self.answer(503)
        self.close_connection = True
        return time.sleep(STALL_S)

    def wait(self, name):
        global running
        with LOCK:
            running += 1
            slow.append(running)
        time.sleep(SLOW_S)
        with LOCK:
            running -= 1
        return self.give(name)

    def names(self, prefix):
        found = sorted(os.path.relpath(os.path.join(root, name), sys.argv[1])
                       for root, _, names in os.walk(sys.argv[1]) for name in names)
        return [name for name in found if name.startswith(prefix)]

    def page(self, query, prefix, token):
        names = self.names(query.get("prefix", [""])[0])
        first = int(query.get(token, ["token 0/"])[0].strip("token /"))
        last = first + PAGE
        return names[first:last], "token %d/" % last if last < len(names) else ""

    def dated(self, kind, name, query):
        """Serves a file without a strong ETag."""
        name = urllib.parse.parse_qs(query).get("f", [name])[0]
        modified = os.path.getmtime(os.path.join(sys.argv[1], name))
        with LOCK:
            modified += next(COUNT) if kind == "redated" else 0
        return self.give(name, tag='W/"1"' if kind == "weak" else "", modified=modified if kind != "bare" else None)

    def error(self, code):
        status, message, more, headers = ERRORS[code]
        return self.answer(status, ("<Error><Code>%s</Code><Message>%s</Message>%s</Error>" % (code, message, more)).encode(),
                           **headers)

    def is_first(self):
        """Returns whether this is the first request with its path."""
        path = self.path.split("?")[0]
        with LOCK:
            first = path not in seen
            seen.add(path)
        return first

    def s3(self, path, query):
        if not signature(self.headers, self.path.split("?")[0], query):
            return self.answer(403)
        fields = urllib.parse.parse_qs(query)
        name = urllib.parse.unquote(path)
        if name:
            return self.give(name)
        names, following = self.page(fields, "prefix", "continuation-token")
        body = "".join("<Contents><Key>%s</Key><ETag>&quot;%s&quot;</ETag><Size>%d</Size></Contents>" % (
            saxutils.escape(item), hashlib.md5(open(os.path.join(sys.argv[1], item), "rb").read()).hexdigest(),
            os.path.getsize(os.path.join(sys.argv[1], item))) for item in names)
        if following:
            body = "<NextContinuationToken>%s</NextContinuationToken>" % following + body
        return self.answer(200, ('<?xml version="1.0"?><ListBucketResult xmlns="x">%s</ListBucketResult>' % body).encode())

    def azure(self, path, query):
        fields = urllib.parse.parse_qs(query)
        if fields.get("sig") != ["se+cret/"]:
            return self.answer(403)
        if path:
            return self.give(urllib.parse.unquote(path), tag='"0x1"')
        names, following = self.page(fields, "prefix", "marker")
        body = "".join("<Blob><Name>%s</Name><Properties><Etag>0x%s</Etag><Content-Length>%d</Content-Length></Properties>"
                       "</Blob>" % (saxutils.escape(item), "1", os.path.getsize(os.path.join(sys.argv[1], item)))
                       for item in names)
        return self.answer(200, ('<EnumerationResults ServiceEndpoint="x"><Blobs>%s</Blobs><NextMarker>%s</NextMarker>'
                                 "</EnumerationResults>" % (body, following)).encode())

    def do_GET(self):
        path, _, query = self.path.partition("?")
        _, kind, *rest = path.split("/", 2)
        name = rest[0] if rest else ""
        if kind == "web":
            return self.give(name)
        if kind == "norange":
            return self.give(name, ranges=False)
        if kind == "faulty":
            return self.fault(name)
        if kind == "slow":
            return self.wait(name)
        if kind == "requests":
            return self.answer(200, b"%d %d\n" % (len(slow), max(slow[-int(name):], default=0)))
        if kind in ("gate", "wholegate"):
            return self.gate(name, kind == "gate")
        if kind == "refused":
            return self.answer(200, b"%d" % refused)
        if kind == "breaking":
            return self.give(name, most=1000000)
        if kind.startswith("retry-"):
            return self.retry(*kind.split("-")[1:], name)
        if kind == "busy":
            return self.answer(503)
        if kind == "changing":
            with LOCK:
                return self.give(name, tag='"%d"' % next(COUNT))
        if kind in ("dated", "redated", "weak", "bare"):
            return self.dated(kind, name, query)
        if kind == "turning":
            with LOCK:
                letter = b"ab"[next(COUNT) % 2]
            return self.give(name, tag="", data=bytes([letter]) * 3000000)
        if kind.startswith("mixed-"):
            return self.mixed(kind[6:], name)
        if kind == "range":
            return self.answer(206, b"x", Content_Range=urllib.parse.unquote(query))
        if kind == "headers":
            return self.answer(206, b"x", Content_Range="bytes 0-0/1",
                               **{"X_%d" % i: "x" * int(name) for i in range(int(query))})
        if kind == "drip":
            return self.drip()
        if kind in ("once", "oncebucket") and self.is_first():
            return self.answer(503)
        if kind == "once":
            return self.give(name)
        if kind == "later":
            return self.give(name, ranges=(self.headers["Range"] or "").startswith("bytes=0-"))
        if kind == "refusing":
            return self.answer(416) if self.headers["Range"] else self.give(name)
        if kind == "unnamed":
            return self.give(name, partial=(self.headers["Range"] or "") == "bytes=0-0")
        if kind == "echo":
            return self.answer(200, str(self.headers).encode(), ETag='"a"')
        if kind == "away":
            return self.answer(302, Location="http://localhost:%d/echo" % self.server.server_address[1])
        if kind.startswith("error-"):
            return self.error(kind[6:])
        if kind.startswith("list-"):
            token = urllib.parse.parse_qs(query).get("continuation-token", [""])[0]
            return self.answer(200, faulty_list(kind[5:], token))
        if kind == "short":
            return self.give(name, cut=True)
        if kind == "endless":
            self.answer(206, b"", Content_Range="bytes 0-0/100000", Content_Length="100000000")
            self.wfile.write(b"x" * 100000)
            self.close_connection = True
            return None
        if kind in ("secure", "plainly"):
            protocol = "https" if kind == "secure" else "http"
            return self.answer(302, Location=protocol + "://" + self.headers["Host"] + "/web/" + name)
        if kind == "loop":
            return self.answer(302, Location=self.path)
        if kind == "list":
            return self.answer(200, b"<html>welcome</html>")
        if kind == "account":
            return self.azure(name.partition("/")[2], query)
        return self.s3(name, query)


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_):
        pass  # clients close connections


def serve(context=None):
    """Starts a server in a thread. Returns its port."""
    server = Server(("127.0.0.1", 0), Handler)
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


if __name__ == "__main__":
    ports = [serve()]
    if sys.argv[2:]:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*sys.argv[2:])
        ports.append(serve(tls))
    print(*ports, flush=True)
    sys.stdin.read()
