// SPDX-License-Identifier: Apache-2.0
// A browser starts no worker for a page that was opened from disk.  There the search runs in a
// hidden frame, which has what it uses of a worker: postMessage, "message" events, importScripts.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = '<script src="' + new URL(url, document.baseURI).href + '"></scr' + "ipt>";
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const prepare = () => {
        const inside = frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = (...urls) =>
          urls.reduce((before, one) => before.then(() => new Promise((done) => {
            const script = inside.document.createElement("script");
            script.src = one;
            script.onload = script.onerror = done;
            inside.document.body.append(script);
          })), Promise.resolve());
      };
      frame.addEventListener("load", () => {
        prepare();
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
      this.frame = frame;
    }
    postMessage(data) {
      if (!this.ready) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
