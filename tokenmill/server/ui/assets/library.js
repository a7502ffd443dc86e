// Conversations in the browser's IndexedDB: they never leave this machine unless they are exported.

const STORE = "conversations";
let opening = null;

function database() {
  opening ||= new Promise((resolve, reject) => {
    const request = indexedDB.open("tokenmill", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function work(mode, action) {
  const transaction = (await database()).transaction(STORE, mode);
  return new Promise((resolve, reject) => {
    const request = action(transaction.objectStore(STORE));
    if (mode === "readwrite") transaction.commit(); // at once: a page that is left before it hears of a change would lose it
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error || request.error);
  });
}

export const allConversations = async () =>
  (await work("readonly", (store) => store.getAll())).sort((a, b) => b.updated - a.updated);
export const getConversation = (id) => work("readonly", (store) => store.get(id));
export const keepConversation = (conversation) => work("readwrite", (store) => store.put(conversation));
export const removeConversation = (id) => work("readwrite", (store) => store.delete(id));
